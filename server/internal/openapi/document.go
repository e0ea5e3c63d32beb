package openapi

import (
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"github.com/klauspost/compress/s2"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/controller/openapi/builder"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/kube-openapi/pkg/handler3"
	"k8s.io/kube-openapi/pkg/spec3"
)

// form is an encoding of a document.
type form int

const (
	formJSON form = iota
	formProtobuf
	forms
)

// document is one version of a document.
type document struct {
	etag     string
	modified time.Time

	mu   sync.Mutex
	data [forms][]byte // compressed; nil until requested
}

// content returns the document in a form. The first call for a document builds it from its definitions, which takes some
// milliseconds for each of them.
func (d *document) content(f form, gv schema.GroupVersion, definitions []*apiextensionsv1.CustomResourceDefinition, options builder.Options) (content, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	data, err := d.encoded(f, gv, definitions, options)
	return content{data: data, etag: d.etag, modified: d.modified}, err
}

// encoded returns the document in a form, and stores it compressed. The lock is held.
func (d *document) encoded(f form, gv schema.GroupVersion, definitions []*apiextensionsv1.CustomResourceDefinition, options builder.Options) (data []byte, err error) {
	if stored := d.data[f]; stored != nil {
		return s2.Decode(nil, stored)
	}
	if f == formProtobuf {
		if data, err = d.encoded(formJSON, gv, definitions, options); err == nil {
			data, err = handler3.ToV3ProtoBinary(data)
		}
	} else {
		data, err = build(gv, definitions, options)
	}
	if err != nil {
		return nil, err
	}
	d.data[f] = s2.EncodeBetter(nil, data)
	return data, nil
}

// build returns the document of the definitions of a group version in JSON.
func build(gv schema.GroupVersion, definitions []*apiextensionsv1.CustomResourceDefinition, options builder.Options) ([]byte, error) {
	specs := make([]*spec3.OpenAPI, 0, len(definitions))
	for _, definition := range definitions {
		spec, err := builder.BuildOpenAPIV3(definition, gv.Version, options)
		if err != nil {
			return nil, fmt.Errorf("OpenAPI document of %s in version %s: %w", definition.Name, gv.Version, err)
		}
		specs = append(specs, spec)
	}
	merged, err := builder.MergeSpecsV3(specs...)
	if err != nil {
		return nil, fmt.Errorf("OpenAPI document of %s: %w", gv, err)
	}
	return json.Marshal(merged)
}
