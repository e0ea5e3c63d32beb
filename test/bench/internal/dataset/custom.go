package dataset

import (
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// Things are a namespaced custom resource. Its selectable field spec.color has another value for
// each object.
const (
	group, plural = "bench.example.com", "things"

	// ThingsPath is the path of all objects.
	ThingsPath = "/apis/" + group + "/v1/" + plural
	// ThingsPrefix is the prefix of the keys in etcd of all objects.
	ThingsPrefix = "/registry/" + ThingsResource + "/"
	// ThingsResource names the resource in etcd, for Count.
	ThingsResource = group + "/" + plural

	definitionKey = "/registry/apiextensions.k8s.io/customresourcedefinitions/" + plural + "." + group
)

// ThingsIn is the path of the objects in a namespace.
func ThingsIn(namespace string) string {
	return "/apis/" + group + "/v1/namespaces/" + namespace + "/" + plural
}

func thingName(index int) string { return fmt.Sprintf("thing-%06d", index) }

// ThingKey is the key in etcd of the object with this index.
func ThingKey(index, namespaces int) string {
	return ThingsPrefix + PodNamespace(index, namespaces) + "/" + thingName(index)
}

// Color is the value of spec.color of the object with this index.
func Color(index int) string { return fmt.Sprintf("color-%d", index) }

// object is JSON.
type object = map[string]any

// Thing returns the object with this index: a list of items, and the managed fields of a client, of
// its controller and of an autoscaler, 2.5 KB in all.
func Thing(index, namespaces int) *unstructured.Unstructured {
	name, created := thingName(index), created.UTC().Format(time.RFC3339)
	var env []any
	items := object{".": object{}}
	for i := range 10 {
		variable := fmt.Sprintf("VARIABLE_%d", i)
		env = append(env, object{"name": variable, "value": textOf(24, name+variable, i)})
		items[fmt.Sprintf(`k:{"name":%q}`, variable)] = object{".": object{}, "f:name": object{}, "f:value": object{}}
	}
	entry := func(manager, operation string, fields object) object {
		return object{"manager": manager, "operation": operation, "apiVersion": group + "/v1", "time": created, "fieldsType": "FieldsV1", "fieldsV1": fields}
	}
	controller := entry("controller", "Update", object{"f:status": object{".": object{}, "f:conditions": object{".": object{},
		`k:{"type":"Ready"}`: object{".": object{}, "f:status": object{}, "f:type": object{}}}}})
	controller["subresource"] = "status"
	return &unstructured.Unstructured{Object: object{
		"apiVersion": group + "/v1", "kind": "Thing",
		"metadata": object{
			"name": name, "namespace": PodNamespace(index, namespaces), "uid": string(uid(plural + " " + name)), "generation": int64(1),
			"creationTimestamp": created, "labels": object{"app": fmt.Sprintf("app-%d", index%100)},
			"managedFields": []any{
				entry("kubectl", "Apply", object{"f:metadata": object{"f:labels": object{"f:app": object{}}},
					"f:spec": object{"f:color": object{}, "f:text": object{}, "f:env": items}}),
				controller,
				entry("autoscaler", "Update", object{"f:spec": object{"f:replicas": object{}}}),
			},
		},
		"spec": object{"color": Color(index), "replicas": int64(index % 10), "text": textOf(200, name, 0), "env": env},
	}}
}

// Definition returns the definition as it is stored when it is established. Its schema has some
// depth, as those of operators do.
func Definition() *unstructured.Unstructured {
	text := object{"type": "string", "description": "A text that the controller of this resource reads, and copies to the objects that it makes."}
	item := object{"type": "object", "required": []any{"name"}, "properties": object{"name": text, "value": text, "optional": object{"type": "boolean"}}}
	list := object{"type": "array", "description": "Items in the order in which the controller applies them.", "items": item}
	spec := object{"type": "object", "properties": object{
		"color": text, "replicas": object{"type": "integer", "minimum": int64(0)}, "text": text, "env": list, "volumes": list, "ports": list,
		"template": object{"type": "object", "properties": object{"first": item, "second": item, "labels": object{"type": "object", "additionalProperties": text}}},
	}}
	condition := object{"type": "object", "properties": object{"type": text, "status": text, "reason": text, "message": text}}
	names := object{"plural": plural, "singular": "thing", "kind": "Thing", "listKind": "ThingList"}
	return &unstructured.Unstructured{Object: object{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
		"metadata": object{
			"name": plural + "." + group, "uid": string(uid("definition " + plural)), "generation": int64(1), "creationTimestamp": created.UTC().Format(time.RFC3339),
		},
		"spec": object{
			"group": group, "names": names, "scope": "Namespaced", "conversion": object{"strategy": "None"},
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
