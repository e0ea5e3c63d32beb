package up

import (
	"errors"
	"fmt"
	"os"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/stratakube/strata/server/internal/datadir"
	"github.com/stratakube/strata/server/internal/pki"
)

// The names of Strata's entries in a kubeconfig.
const (
	clusterName = "strata"
	contextName = "strata"
	adminName   = "strata-admin"

	// replicasContextName is the context, and replicasClusterName the cluster, of the read replicas
	// of --ha.
	replicasContextName = "strata-replicas"
	replicasClusterName = "strata-replicas"
)

// adminKubeconfig writes Strata's cluster, user and context to the kubeconfig at path, with
// embedded certificates and key, so that the file can be copied. Other content of an existing
// Strata kubeconfig, such as a namespace set with kubectl config, is preserved. A file without
// Strata's entries is an error.
func adminKubeconfig(path, url string, files *pki.Files) error {
	config, err := ourKubeconfig(path)
	if err != nil {
		return err
	}
	ca, err := os.ReadFile(files.CA)
	if err != nil {
		return err
	}
	cert, key, err := pki.Split(files.Admin)
	if err != nil {
		return err
	}
	config.Clusters[clusterName] = &clientcmdapi.Cluster{Server: url, CertificateAuthorityData: ca}
	config.AuthInfos[adminName] = &clientcmdapi.AuthInfo{ClientCertificateData: cert, ClientKeyData: key}
	if config.Contexts[contextName] == nil {
		config.Contexts[contextName] = clientcmdapi.NewContext()
	}
	config.Contexts[contextName].Cluster = clusterName
	config.Contexts[contextName].AuthInfo = adminName
	if config.CurrentContext == "" {
		config.CurrentContext = contextName
	}
	return writeKubeconfig(path, config)
}

// replicasContext adds the read replicas at url to the kubeconfig at path, which adminKubeconfig
// has written.
func replicasContext(path, url string) error {
	config, err := ourKubeconfig(path)
	if err != nil {
		return err
	}
	cluster := config.Clusters[clusterName].DeepCopy()
	cluster.Server = url
	config.Clusters[replicasClusterName] = cluster
	if config.Contexts[replicasContextName] == nil {
		config.Contexts[replicasContextName] = clientcmdapi.NewContext()
	}
	config.Contexts[replicasContextName].Cluster = replicasClusterName
	config.Contexts[replicasContextName].AuthInfo = adminName
	return writeKubeconfig(path, config)
}

// ourKubeconfig returns the kubeconfig at path, or an empty one if there is no file. A file without
// Strata's entries is an error.
func ourKubeconfig(path string) (*clientcmdapi.Config, error) {
	data, err := os.ReadFile(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return clientcmdapi.NewConfig(), nil
	case err != nil:
		return nil, fmt.Errorf("kubeconfig: %w", err)
	}
	config, err := clientcmd.Load(data)
	if err != nil || config.Clusters[clusterName] == nil || config.AuthInfos[adminName] == nil {
		return nil, fmt.Errorf("kubeconfig %s was not written by strata up and is not overwritten; name another file with --kubeconfig", path)
	}
	return config, nil
}

// controllersKubeconfig writes a kubeconfig for the controllers. It references the certificate
// files, so that renewed certificates are used.
func controllersKubeconfig(path, url string, files *pki.Files) error {
	config := clientcmdapi.NewConfig()
	config.Clusters[clusterName] = &clientcmdapi.Cluster{Server: url, CertificateAuthority: files.CA}
	config.AuthInfos[pki.ControllerManagerUser] = &clientcmdapi.AuthInfo{
		ClientCertificate: files.ControllerManager,
		ClientKey:         files.ControllerManager,
	}
	config.Contexts[contextName] = &clientcmdapi.Context{Cluster: clusterName, AuthInfo: pki.ControllerManagerUser}
	config.CurrentContext = contextName
	return writeKubeconfig(path, config)
}

func writeKubeconfig(path string, config *clientcmdapi.Config) error {
	data, err := clientcmd.Write(*config)
	if err != nil {
		return fmt.Errorf("kubeconfig %s: %w", path, err)
	}
	if err := datadir.WriteFile(path, data); err != nil {
		return fmt.Errorf("kubeconfig: %w", err)
	}
	return nil
}
