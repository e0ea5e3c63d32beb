package transcode

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// customResource returns the stored JSON of a custom resource as controllers write it: with labels,
// an owner, the fields of its managers, and conditions. The spec has rules until the object has
// about size bytes.
func customResource(tb testing.TB, size, managers int) []byte {
	tb.Helper()
	at := metav1.NewTime(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC))
	u := &unstructured.Unstructured{Object: map[string]any{
		"spec": map[string]any{"color": "red", "replicas": int64(3), "weight": 0.5, "paused": false},
		"status": map[string]any{"observedGeneration": int64(2), "conditions": []any{map[string]any{
			"type": "Ready", "status": "True", "reason": "Reconciled", "lastTransitionTime": "2026-01-02T03:04:05Z", "message": `the backend "a" is ready`,
		}}},
	}}
	u.SetGroupVersionKind(thing)
	u.SetName("thing-00042")
	u.SetNamespace("team-a")
	u.SetUID("0e6f3a52-7d1b-4c58-9e10-2b7c7ad5e1f3")
	u.SetCreationTimestamp(at)
	u.SetGeneration(2)
	u.SetLabels(map[string]string{"app.kubernetes.io/name": "thing", "app.kubernetes.io/managed-by": "operator", "team": "a", "tier": "backend"})
	u.SetOwnerReferences([]metav1.OwnerReference{{APIVersion: "example.com/v1", Kind: "Group", Name: "group-7", UID: "5a7f0a4e-95ee-4f4e-8c9b-0d4b0a5b3c11"}})
	var entries []metav1.ManagedFieldsEntry
	for i := range managers {
		entries = append(entries, metav1.ManagedFieldsEntry{
			Manager: fmt.Sprint("manager-", i), Operation: metav1.ManagedFieldsOperationApply, APIVersion: "example.com/v1", Time: &at, FieldsType: "FieldsV1",
			FieldsV1: metav1.NewFieldsV1(`{"f:metadata":{"f:labels":{"f:app.kubernetes.io/name":{},"f:team":{},"f:tier":{}},"f:ownerReferences":{"k:{\"uid\":\"5a7f0a4e-95ee-4f4e-8c9b-0d4b0a5b3c11\"}":{}}},"f:spec":{"f:color":{},"f:replicas":{},"f:rules":{"k:{\"port\":8080,\"protocol\":\"TCP\"}":{".":{},"f:port":{}}}},"f:status":{"f:conditions":{"k:{\"type\":\"Ready\"}":{".":{},"f:lastTransitionTime":{},"f:status":{}}}}}`),
		})
	}
	u.SetManagedFields(entries)
	var rules []any
	for i := 0; ; i++ {
		data, err := json.Marshal(u.Object)
		if err != nil {
			tb.Fatal(err)
		}
		if len(data) >= size {
			return append(data, '\n')
		}
		rules = append(rules, map[string]any{"port": int64(8080 + i), "protocol": "TCP", "host": fmt.Sprintf("host-%d.example.com", i), "path": "/" + strings.Repeat("p", i%8)})
		u.Object["spec"].(map[string]any)["rules"] = rules
	}
}

// BenchmarkFindJSON reads a label and a selectable field of custom resources.
func BenchmarkFindJSON(b *testing.B) {
	for _, object := range []struct {
		name           string
		size, managers int
	}{{"1KB", 1000, 0}, {"2.5KB-managers=3", 2500, 3}, {"20KB", 20_000, 3}} {
		data := customResource(b, object.size, object.managers)
		for name, find := range map[string]Find{"label": FindJSONLabel(thing, "team"), "field": FindJSONField(thing, "spec.color")} {
			b.Run(object.name+"/"+name, func(b *testing.B) {
				b.SetBytes(int64(len(data)))
				b.ReportAllocs()
				for b.Loop() {
					if _, present, ok := find(data); !present || !ok {
						b.Fatal("not found")
					}
				}
			})
		}
	}
}
