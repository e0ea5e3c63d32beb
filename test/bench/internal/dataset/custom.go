package dataset

import (
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// CustomResource is a namespaced custom resource with the group CustomGroup. Its selectable field
// spec.color has another value for each object.
type CustomResource struct {
	Plural, Kind string
}

// CustomGroup is the API group of custom resources, with the version v1.
const CustomGroup = "bench.example.com"

// Things is the custom resource of Spec.Things.
var Things = CustomResource{"things", "Thing"}

// Definitions is a prefix of the keys in etcd of all definitions.
const Definitions = "/registry/apiextensions.k8s.io/customresourcedefinitions/"

// NumberedResource is one of many custom resources.
func NumberedResource(index int) CustomResource {
	return CustomResource{fmt.Sprintf("kind%04ds", index), fmt.Sprintf("Kind%04d", index)}
}

// Key is the key in etcd of the definition.
func (r CustomResource) Key() string { return Definitions + r.name() }

func (r CustomResource) name() string { return r.Plural + "." + CustomGroup }

// Path is the path of all objects.
func (r CustomResource) Path() string { return "/apis/" + CustomGroup + "/v1/" + r.Plural }

// ObjectPath is the path of the object with this index.
func (r CustomResource) ObjectPath(index int) string {
	return "/apis/" + CustomGroup + "/v1/namespaces/" + Namespace + "/" + r.Plural + "/" + r.objectName(index)
}

// ObjectKey is the key in etcd of the object with this index; with -1 it is the prefix of all
// objects.
func (r CustomResource) ObjectKey(index int) string {
	prefix := "/registry/" + CustomGroup + "/" + r.Plural + "/"
	if index < 0 {
		return prefix
	}
	return prefix + Namespace + "/" + r.objectName(index)
}

func (r CustomResource) objectName(index int) string { return fmt.Sprintf("%s-%06d", r.Plural, index) }

// Color is the value of spec.color of the object with this index.
func Color(index int) string { return fmt.Sprintf("color-%d", index) }

// object is JSON.
type object = map[string]any

// Object returns the object with this index, of about 500 bytes.
func (r CustomResource) Object(index int) *unstructured.Unstructured {
	name := r.objectName(index)
	return &unstructured.Unstructured{Object: object{
		"apiVersion": CustomGroup + "/v1", "kind": r.Kind,
		"metadata": object{
			"name": name, "namespace": Namespace, "uid": string(uid(r.Plural + " " + name)), "generation": int64(1),
			"creationTimestamp": created.UTC().Format(time.RFC3339), "labels": object{"app": fmt.Sprintf("app-%d", index%100)},
		},
		"spec": object{"color": Color(index), "replicas": int64(index % 10), "text": textOf(200, name, 0)},
	}}
}

// ManagedObject is Object with a list of 16 items, and with the managed fields of a client that
// applies it and of its controller, which are about half of it.
func (r CustomResource) ManagedObject(index int) *unstructured.Unstructured {
	o := r.Object(index)
	spec, metadata := o.Object["spec"].(object), o.Object["metadata"].(object)
	var env []any
	items := object{".": object{}}
	for i := range 16 {
		name := fmt.Sprintf("VARIABLE_%d", i)
		env = append(env, object{"name": name, "value": textOf(24, o.GetName()+name, i)})
		items[fmt.Sprintf(`k:{"name":%q}`, name)] = object{".": object{}, "f:name": object{}, "f:value": object{}}
	}
	spec["env"] = env
	entry := func(manager, operation, subresource string, fields object) object {
		e := object{"manager": manager, "operation": operation, "apiVersion": CustomGroup + "/v1", "time": created.UTC().Format(time.RFC3339), "fieldsType": "FieldsV1", "fieldsV1": fields}
		if subresource != "" {
			e["subresource"] = subresource
		}
		return e
	}
	metadata["managedFields"] = []any{
		entry("kubectl", "Apply", "", object{"f:metadata": object{"f:labels": object{"f:app": object{}}},
			"f:spec": object{"f:color": object{}, "f:replicas": object{}, "f:text": object{}, "f:env": items}}),
		entry("controller", "Update", "status", object{"f:status": object{".": object{}, "f:conditions": object{".": object{},
			`k:{"type":"Ready"}`: object{".": object{}, "f:status": object{}, "f:type": object{}}}}}),
	}
	return o
}

// Definition returns the definition as it is stored when it is established. Its schema has some
// depth, as those of operators do.
func (r CustomResource) Definition() *unstructured.Unstructured {
	text := object{"type": "string", "description": "A text that the controller of this resource reads, and copies to the objects that it makes."}
	item := object{"type": "object", "required": []any{"name"}, "properties": object{"name": text, "value": text, "optional": object{"type": "boolean"}}}
	list := object{"type": "array", "description": "Items in the order in which the controller applies them.", "items": item}
	spec := object{"type": "object", "properties": object{
		"color": text, "replicas": object{"type": "integer", "minimum": int64(0)}, "text": text, "env": list, "volumes": list, "ports": list,
		"template": object{"type": "object", "properties": object{"first": item, "second": item, "labels": object{"type": "object", "additionalProperties": text}}},
	}}
	condition := object{"type": "object", "properties": object{"type": text, "status": text, "reason": text, "message": text}}
	names := object{"plural": r.Plural, "singular": r.Plural[:len(r.Plural)-1], "kind": r.Kind, "listKind": r.Kind + "List"}
	return &unstructured.Unstructured{Object: object{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
		"metadata": object{
			"name": r.name(), "uid": string(uid("definition " + r.Plural)), "generation": int64(1), "creationTimestamp": created.UTC().Format(time.RFC3339),
		},
		"spec": object{
			"group": CustomGroup, "names": names, "scope": "Namespaced", "conversion": object{"strategy": "None"},
			"versions": []any{object{
				"name": "v1", "served": true, "storage": true,
				"selectableFields": []any{object{"jsonPath": ".spec.color"}},
				"schema": object{"openAPIV3Schema": object{"type": "object", "properties": object{
					"apiVersion": object{"type": "string"}, "kind": object{"type": "string"}, "metadata": object{"type": "object"},
					"spec": spec, "status": object{"type": "object", "properties": object{"conditions": object{"type": "array", "items": condition}}},
				}}},
			}},
		},
		"status": object{
			"acceptedNames": names, "storedVersions": []any{"v1"},
			"conditions": []any{
				object{"type": "NamesAccepted", "status": "True", "reason": "NoConflicts", "lastTransitionTime": created.UTC().Format(time.RFC3339)},
				object{"type": "Established", "status": "True", "reason": "InitialNamesAccepted", "lastTransitionTime": created.UTC().Format(time.RFC3339)},
			},
		},
	}}
}
