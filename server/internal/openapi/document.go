package openapi

import (
	"encoding/json"
	"sync"
	"time"

	"github.com/klauspost/compress/s2"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/controller/openapi/builder"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/klog/v2"
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

	forms [forms]encodedForm
}

// encodedForm is a form of a document.
type encodedForm struct {
	mu         sync.Mutex // held while the form is made; that of protobuf before that of JSON
	compressed []byte     // nil until requested
}

// content returns the document in a form. The first call for a form makes it, and concurrent calls
// wait for it: JSON takes about 3 ms for each definition, protobuf 4 ms more. Later calls
// decompress it.
func (d *document) content(f form, gv schema.GroupVersion, definitions []*apiextensionsv1.CustomResourceDefinition, options builder.Options) (content, error) {
	data, err := d.encoded(f, gv, definitions, options)
	return content{data: data, etag: d.etag, modified: d.modified}, err
}

// encoded returns the document in a form, and stores it compressed.
func (d *document) encoded(f form, gv schema.GroupVersion, definitions []*apiextensionsv1.CustomResourceDefinition, options builder.Options) ([]byte, error) {
	form := &d.forms[f]
	form.mu.Lock()
	if stored := form.compressed; stored != nil {
		form.mu.Unlock()
		return s2.Decode(nil, stored)
	}
	defer form.mu.Unlock()
	var data []byte
	var err error
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
	form.compressed = s2.EncodeBetter(nil, data)
	return data, nil
}

// build returns the document of the definitions of a group version in JSON. It leaves out a
// definition that cannot be in it, as upstream's controller does, and logs that.
func build(gv schema.GroupVersion, definitions []*apiextensionsv1.CustomResourceDefinition, options builder.Options) ([]byte, error) {
	var names []string
	var specs []*spec3.OpenAPI
	for _, definition := range definitions {
		spec, err := builder.BuildOpenAPIV3(definition, gv.Version, options)
		if err != nil {
			leftOut(gv, definition.Name, err)
			continue
		}
		names, specs = append(names, definition.Name), append(specs, spec)
	}
	merged, err := builder.MergeSpecsV3(specs...)
	if err != nil {
		merged = mergeEach(gv, names, specs)
	}
	return json.Marshal(merged)
}

// mergeEach merges the documents of single definitions without those that conflict with an earlier
// one: names of kinds can be changed after a definition is established, and are then not unique.
func mergeEach(gv schema.GroupVersion, names []string, specs []*spec3.OpenAPI) *spec3.OpenAPI {
	merged := &spec3.OpenAPI{}
	for n, accepted := 0, []*spec3.OpenAPI(nil); n < len(specs); n++ {
		all, err := builder.MergeSpecsV3(append(accepted, specs[n])...)
		if err != nil {
			leftOut(gv, names[n], err)
			continue
		}
		merged, accepted = all, append(accepted, specs[n])
	}
	return merged
}

func leftOut(gv schema.GroupVersion, name string, err error) {
	klog.ErrorS(err, "A definition is not in the OpenAPI document of its group version; correct the names in its specification",
		"definition", name, "groupVersion", gv)
}
