package stratatest

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
)

var definitionsResource = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}

// definition is a CustomResourceDefinition and the file that it is from.
type definition struct {
	file   string
	object *unstructured.Unstructured
}

// readDefinitions returns the definitions in files, and in the files of directories. Each path must
// have one.
func readDefinitions(paths []string) (all []definition, err error) {
	for _, path := range paths {
		files, err := filesOf(path)
		if err != nil {
			return nil, fmt.Errorf("read CustomResourceDefinitions: %w", err)
		}
		before := len(all)
		for _, file := range files {
			found, err := readFile(file)
			if err != nil {
				return nil, fmt.Errorf("read CustomResourceDefinitions: %w", err)
			}
			all = append(all, found...)
		}
		if len(all) == before {
			return nil, fmt.Errorf("read CustomResourceDefinitions: %s has none; give a YAML or JSON file, or a directory with such files", path)
		}
	}
	return all, nil
}

// filesOf returns path, or the YAML and JSON files in it if it is a directory.
func filesOf(path string) ([]string, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		return []string{path}, nil
	}
	entries, err := os.ReadDir(path) // sorted
	if err != nil {
		return nil, err
	}
	var files []string
	for _, entry := range entries {
		if !entry.IsDir() && slices.Contains([]string{".yaml", ".yml", ".json"}, filepath.Ext(entry.Name())) {
			files = append(files, filepath.Join(path, entry.Name()))
		}
	}
	return files, nil
}

// readFile returns the definitions among the documents of a file.
func readFile(file string) (found []definition, err error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	documents := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(content)))
	for n := 1; ; n++ {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return found, nil
		}
		object := &unstructured.Unstructured{}
		if err == nil {
			err = yaml.Unmarshal(document, &object.Object)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: document %d: %w", file, n, err)
		}
		if object.GetKind() != "CustomResourceDefinition" {
			continue
		}
		if object.GetAPIVersion() != definitionsResource.GroupVersion().String() {
			return nil, fmt.Errorf("%s: document %d: CustomResourceDefinition of version %q, want %s", file, n, object.GetAPIVersion(), definitionsResource.GroupVersion())
		}
		found = append(found, definition{file, object})
	}
}

// pollInterval is the interval of requests for the state of a definition, which is established
// within some 10 ms.
const pollInterval = 10 * time.Millisecond

// install creates the definitions and returns when the API serves all of them.
func install(ctx context.Context, config *rest.Config, definitions []definition) error {
	if len(definitions) == 0 {
		return nil
	}
	client, err := dynamic.NewForConfig(config)
	if err != nil {
		return err
	}
	served, err := discovery.NewDiscoveryClientForConfig(config)
	if err != nil {
		return err
	}
	for _, d := range definitions {
		if _, err := client.Resource(definitionsResource).Create(ctx, d.object, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("create the CustomResourceDefinition %q of %s: %w", d.object.GetName(), d.file, err)
		}
	}
	for _, d := range definitions {
		state := "no state yet"
		err := wait.PollUntilContextCancel(ctx, pollInterval, true, func(ctx context.Context) (done bool, err error) {
			state, err = stateOf(ctx, client, served, d.object.GetName())
			return state == "", err
		})
		if err != nil {
			return fmt.Errorf("wait for the CustomResourceDefinition %q of %s: %w; %s", d.object.GetName(), d.file, err, state)
		}
	}
	return nil
}

// stateOf returns "" if all versions of the definition are served and found by discovery, otherwise
// the reason why not.
func stateOf(ctx context.Context, client dynamic.Interface, served discovery.ServerResourcesInterface, name string) (state string, err error) {
	object, err := client.Resource(definitionsResource).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	conditions, _, _ := unstructured.NestedSlice(object.Object, "status", "conditions")
	state = "it has no condition Established"
	for _, c := range conditions {
		condition, _ := c.(map[string]any)
		switch {
		case condition["type"] == "NamesAccepted" && condition["status"] == "False":
			return "", fmt.Errorf("its names are not accepted: %v", condition["message"])
		case condition["type"] == "Established" && condition["status"] == "True":
			state = ""
		}
	}
	if state != "" {
		return state, nil
	}
	group, _, _ := unstructured.NestedString(object.Object, "spec", "group")
	plural, _, _ := unstructured.NestedString(object.Object, "spec", "names", "plural")
	versions, _, _ := unstructured.NestedSlice(object.Object, "spec", "versions")
	for _, v := range versions {
		version, _ := v.(map[string]any)
		if version["served"] != true {
			continue
		}
		resource := schema.GroupVersionResource{Group: group, Version: fmt.Sprint(version["name"]), Resource: plural}
		if _, err := client.Resource(resource).List(ctx, metav1.ListOptions{Limit: 1}); apierrors.IsNotFound(err) {
			return fmt.Sprintf("%s is not served yet", resource.GroupVersion()), nil
		}
		// Discovery follows a moment later. Clients that map kinds to resources depend on it.
		found, err := served.ServerResourcesForGroupVersion(resource.GroupVersion().String())
		if err != nil && !apierrors.IsNotFound(err) {
			return "", err
		}
		if err != nil || !slices.ContainsFunc(found.APIResources, func(r metav1.APIResource) bool { return r.Name == plural }) {
			return fmt.Sprintf("discovery does not have %s yet", resource), nil
		}
	}
	return "", nil
}
