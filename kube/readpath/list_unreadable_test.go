package readpath

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"reflect"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/storage"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	featuregatetesting "k8s.io/component-base/featuregate/testing"
)

// TestList_UnreadableObjects_AreNamedInStatus compares the status of a LIST of objects that cannot
// be decrypted with that of storage.Interface, which tests in kubestorage compare with upstream's
// store.
func TestList_UnreadableObjects_AreNamedInStatus(t *testing.T) {
	for _, enabled := range []bool{true, false} {
		t.Run(fmt.Sprintf("AllowUnsafeMalformedObjectDeletion=%t", enabled), func(t *testing.T) {
			featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.AllowUnsafeMalformedObjectDeletion, enabled)
			w := watchedPods(t)
			w.locked.Store(true)
			w.put(t, w.object("a", nil))
			for i := range 3 {
				w.put(t, w.object(fmt.Sprintf("locked-%d", i), nil))
			}
			w.put(t, w.object("z", nil))
			compare := func(query string, causes int, pred storage.SelectionPredicate) {
				t.Helper()
				err := w.resource.Store.GetList(context.Background(), "/pods/", storage.ListOptions{Predicate: pred, Recursive: true}, &example.PodList{})
				for n := 0; apierrors.IsTooManyRequests(err) && n < 10; n++ {
					err = w.resource.Store.GetList(context.Background(), "/pods/", storage.ListOptions{Predicate: pred, Recursive: true}, &example.PodList{})
				}
				req := httptest.NewRequest(http.MethodGet, "/apis/example.apiserver.k8s.io/v1/pods?"+query, nil)
				req.Header.Set("Accept", "application/json")
				rw := httptest.NewRecorder()
				w.ServeHTTP(rw, req)
				for n := 0; rw.Code == http.StatusTooManyRequests && n < 10; n++ { // memory is late
					rw = httptest.NewRecorder()
					w.ServeHTTP(rw, req)
				}
				var got metav1.Status
				if err := json.Unmarshal(rw.Body.Bytes(), &got); err != nil {
					t.Fatal(err)
				}
				if causes == 0 && enabled {
					if rw.Code != http.StatusOK || err != nil {
						t.Errorf("%s: %d, %v, want success", query, rw.Code, err)
					}
					return
				}
				if rw.Code != http.StatusInternalServerError || got.Code != http.StatusInternalServerError {
					t.Fatalf("%s: %d %s", query, rw.Code, rw.Body)
				}
				if !enabled {
					if got.Reason != metav1.StatusReasonInternalError {
						t.Errorf("%s: reason %s", query, got.Reason)
					}
					return
				}
				var want *apierrors.StatusError
				if !errors.As(err, &want) {
					t.Fatalf("%s: the storage has %v", query, err)
				}
				want.ErrStatus.TypeMeta = metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}
				if !reflect.DeepEqual(got, want.ErrStatus) {
					t.Errorf("%s:\n%+v, want\n%+v", query, got, want.ErrStatus)
				}
				if got.Reason != metav1.StatusReasonStoreReadError || got.Details == nil || len(got.Details.Causes) != causes {
					t.Errorf("%s: %s with %+v, want %d causes", query, got.Reason, got.Details, causes)
				}
			}
			pred := func(limit int64, selector string) storage.SelectionPredicate {
				p := storage.Everything
				p.Limit, p.GetAttrs = limit, attrsOf
				p.Label, _ = labels.Parse(selector)
				return p
			}
			compare("", 3, pred(0, ""))
			compare("labelSelector=x!%3Dy", 3, pred(0, "x!=y"))
			if enabled {
				compare("limit=1&labelSelector=x!%3Dy", 0, pred(1, "x!=y"))
			}
			for i := range 99 {
				w.put(t, w.object(fmt.Sprintf("locked-more-%02d", i), nil))
			}
			compare("", 101, pred(0, "")) // 100 objects, and a continue token
		})
	}
}
