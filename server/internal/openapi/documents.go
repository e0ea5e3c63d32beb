// Package openapi serves the OpenAPI v3 documents of custom resources. A document is built when a
// client requests it, and is then stored compressed. The controller of
// k8s.io/apiextensions-apiserver builds the documents of all definitions at the start, decoded and
// encoded, which takes about 0.4 MB and 5 ms of processor time for each definition.
package openapi

import (
	"crypto/sha512"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"time"

	apiextensionshelpers "k8s.io/apiextensions-apiserver/pkg/apihelpers"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/controller/openapi/builder"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-base/version"
	"k8s.io/klog/v2"
	"k8s.io/kube-openapi/pkg/handler3"
)

// root is the path of the list of documents. The path of a document begins with it.
const root = "/openapi/v3"

// Documents are the OpenAPI v3 documents of the custom resources of a server, one for each group
// and version. They follow an informer of definitions (Follow). The memory of a document that no
// client has requested is that of its entity tag.
//
// Documents is safe for concurrent use.
type Documents struct {
	options builder.Options

	mu        sync.Mutex                       // guards the fields below
	versions  map[string][]schema.GroupVersion // with a document, by the name of the definition
	groups    map[schema.GroupVersion]*group
	discovery *content // nil after a change
}

// group is a group version with at least one definition. Documents.mu guards its fields.
type group struct {
	definitions map[string]source
	document    *document
	changed     bool // document is that of earlier definitions
}

// source is a definition and the digest of everything in it that its document of one version
// depends on.
type source struct {
	definition *apiextensionsv1.CustomResourceDefinition // of the informer, which also holds it
	digest     [sha512.Size256]byte
}

// NewDocuments returns the documents of a server without definitions. selectableFields tells
// whether documents name the selectable fields of resources, as the feature gate
// CustomResourceFieldSelectors says.
func NewDocuments(selectableFields bool) *Documents {
	return &Documents{
		options:  builder.Options{IncludeSelectableFields: selectableFields},
		versions: map[string][]schema.GroupVersion{}, groups: map[schema.GroupVersion]*group{},
	}
}

// Follow makes d follow the definitions of an informer. An event costs one encoding of each served
// version of a definition.
func (d *Documents) Follow(informer cache.SharedIndexInformer) error {
	_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) { d.set(obj.(*apiextensionsv1.CustomResourceDefinition)) },
		UpdateFunc: func(old, obj any) {
			was, is := old.(*apiextensionsv1.CustomResourceDefinition), obj.(*apiextensionsv1.CustomResourceDefinition)
			if was.ResourceVersion != is.ResourceVersion || is.ResourceVersion == "" {
				// else a resync of the informer
				d.set(is)
			}
		},
		DeleteFunc: func(obj any) {
			if name, err := cache.DeletionHandlingMetaNamespaceKeyFunc(obj); err == nil {
				d.remove(name)
			}
		},
	})
	if err != nil {
		return fmt.Errorf("watch definitions for OpenAPI: %w", err)
	}
	return nil
}

// set publishes the documents of the served versions of a definition, or none before the definition
// is established.
func (d *Documents) set(definition *apiextensionsv1.CustomResourceDefinition) {
	served := map[schema.GroupVersion]source{}
	if apiextensionshelpers.IsCRDConditionTrue(definition, apiextensionsv1.Established) {
		for i, v := range definition.Spec.Versions {
			if !v.Served {
				continue
			}
			gv := schema.GroupVersion{Group: definition.Spec.Group, Version: v.Name}
			digest, err := digestOf(definition, i)
			if err != nil {
				klog.ErrorS(err, "Cannot encode a definition; it is in no OpenAPI document", "definition", definition.Name, "version", v.Name)
				continue
			}
			served[gv] = source{definition, digest}
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, gv := range d.versions[definition.Name] {
		if _, ok := served[gv]; !ok {
			d.withdraw(gv, definition.Name)
		}
	}
	for gv, now := range served {
		g := d.groups[gv]
		if g == nil {
			g = &group{definitions: map[string]source{}}
			d.groups[gv] = g
		}
		was, ok := g.definitions[definition.Name]
		g.definitions[definition.Name] = now
		if !ok || was.digest != now.digest {
			g.changed, d.discovery = true, nil
		}
	}
	d.versions[definition.Name] = slices.Collect(maps.Keys(served))
	if len(served) == 0 {
		delete(d.versions, definition.Name)
	}
}

// remove withdraws the documents of a definition.
func (d *Documents) remove(name string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, gv := range d.versions[name] {
		d.withdraw(gv, name)
	}
	delete(d.versions, name)
}

// withdraw removes a definition from a group version. The lock is held.
func (d *Documents) withdraw(gv schema.GroupVersion, name string) {
	g := d.groups[gv]
	delete(g.definitions, name)
	if len(g.definitions) == 0 {
		delete(d.groups, gv)
	}
	g.changed, d.discovery = true, nil
}

// current returns the document of the present definitions of a group version. Documents.mu is held.
func (g *group) current(gv schema.GroupVersion, selectableFields bool) *document {
	if g.changed || g.document == nil {
		g.changed = false
		if tag := tagOf(gv, g.definitions, selectableFields); g.document == nil || g.document.etag != tag {
			g.document = &document{etag: tag, modified: time.Now()}
		}
	}
	return g.document
}

// digestOf returns the digest of everything in a definition that the document of its version i
// depends on: the specification without other versions, columns of tables and the conversion.
func digestOf(definition *apiextensionsv1.CustomResourceDefinition, i int) ([sha512.Size256]byte, error) {
	spec := definition.Spec // a shallow copy
	spec.Conversion = nil
	spec.Versions = slices.Clone(spec.Versions[i : i+1])
	spec.Versions[0].AdditionalPrinterColumns = nil
	b, err := spec.Marshal() // with sorted keys
	return sha512.Sum512_256(b), err
}

// tagOf returns the entity tag of a document: a hash of everything that the document depends on, so
// that servers of the same release agree on it and a client finds out without the document that it
// has the current one.
func tagOf(gv schema.GroupVersion, definitions map[string]source, selectableFields bool) string {
	hash := sha512.New()
	fmt.Fprintf(hash, "%s %s %t\n", version.Get().GitVersion, gv, selectableFields)
	for _, name := range slices.Sorted(maps.Keys(definitions)) {
		digest := definitions[name].digest
		fmt.Fprintf(hash, "%s %x\n", name, digest)
	}
	return fmt.Sprintf("%X", hash.Sum(nil))
}

// find returns the document of a group version with its definitions, in the order of their names,
// or nil.
func (d *Documents) find(gv schema.GroupVersion) (*document, []*apiextensionsv1.CustomResourceDefinition) {
	d.mu.Lock()
	defer d.mu.Unlock()
	g := d.groups[gv]
	if g == nil {
		return nil, nil
	}
	definitions := make([]*apiextensionsv1.CustomResourceDefinition, 0, len(g.definitions))
	for _, name := range slices.Sorted(maps.Keys(g.definitions)) {
		definitions = append(definitions, g.definitions[name].definition)
	}
	return g.current(gv, d.options.IncludeSelectableFields), definitions
}

// list returns the list of documents, in which more has those of other resources.
func (d *Documents) list(more map[string]handler3.OpenAPIV3DiscoveryGroupVersion) (content, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.discovery != nil {
		return *d.discovery, nil
	}
	all := handler3.OpenAPIV3Discovery{Paths: maps.Clone(more)}
	if all.Paths == nil {
		all.Paths = map[string]handler3.OpenAPIV3DiscoveryGroupVersion{}
	}
	for gv, g := range d.groups {
		name := pathOf(gv)
		all.Paths[name] = handler3.OpenAPIV3DiscoveryGroupVersion{ServerRelativeURL: location(name, g.current(gv, d.options.IncludeSelectableFields).etag)}
	}
	b, err := json.Marshal(all)
	if err != nil {
		return content{}, err
	}
	d.discovery = &content{data: b, etag: fmt.Sprintf("%X", sha512.Sum512(b)), modified: time.Now()}
	return *d.discovery, nil
}

// pathOf returns the path of a group version below root.
func pathOf(gv schema.GroupVersion) string { return "apis/" + gv.Group + "/" + gv.Version }

// location returns the address of a version of a document.
func location(name, etag string) string {
	u := url.URL{Path: root + "/" + name, RawQuery: url.Values{"hash": {etag}}.Encode()}
	return u.String()
}

// content is the body of a response with its validators.
type content struct {
	data     []byte
	etag     string
	modified time.Time
}

// pathHandlers is a multiplexer of upstream's servers.
type pathHandlers interface {
	Unregister(path string)
	Handle(path string, handler http.Handler)
	HandlePrefix(path string, handler http.Handler)
}

// Install makes d answer requests for documents in place of builtIn, which has the documents of the
// other resources of the server, and to which all requests for those are passed. builtIn must not
// change afterwards.
func (d *Documents) Install(mux pathHandlers, builtIn *handler3.OpenAPIService) error {
	h, err := newHandler(d, builtIn)
	if err != nil {
		return err
	}
	mux.Unregister(root)
	mux.Unregister(root + "/")
	mux.Handle(root, http.HandlerFunc(h.serveList))
	mux.HandlePrefix(root+"/", http.HandlerFunc(h.serveDocument))
	return nil
}
