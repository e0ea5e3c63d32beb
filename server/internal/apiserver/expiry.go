package apiserver

import (
	"bytes"
	"context"
	"time"

	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	certutil "k8s.io/client-go/util/cert"
	"k8s.io/klog/v2"
)

// expiryInterval is the longest time between two reads of the certificates for serving.
const expiryInterval = 10 * time.Second

// logExpired logs each certificate for serving that has expired, once, until ctx is cancelled.
// Clients refuse it, and their alert does not say why.
func logExpired(ctx context.Context, serving *genericapiserver.SecureServingInfo) {
	certs := []dynamiccertificates.CertKeyContentProvider{serving.Cert}
	for _, c := range serving.SNICerts {
		certs = append(certs, c)
	}
	logged := make([][]byte, len(certs))
	for {
		wait := expiryInterval
		for i, provider := range certs {
			if provider == nil {
				continue
			}
			content, _ := provider.CurrentCertKeyContent()
			chain, err := certutil.ParseCertsPEM(content)
			if err != nil || bytes.Equal(content, logged[i]) {
				continue
			}
			if left := time.Until(chain[0].NotAfter); left >= 0 {
				wait = min(wait, left+1) // it is valid at NotAfter
				continue
			}
			logged[i] = content
			klog.ErrorS(nil, "A certificate for serving has expired, clients refuse it", "source", provider.Name(),
				"subject", chain[0].Subject.String(), "expired", chain[0].NotAfter)
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return
		}
	}
}
