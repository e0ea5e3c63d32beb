package readpath

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"
)

// TestList_Panic_ReleasesPlace: a list that panics releases its slot of the bounded number of
// concurrent lists from etcd.
func TestList_Panic_ReleasesPlace(t *testing.T) {
	w := watchedPodsWith(t)
	armed := false
	w.resource.Decorate = func(runtime.Object) {
		if armed {
			panic("of a test")
		}
	}
	get := func(query string) (code int, list examplev1.PodList) {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		req := httptest.NewRequest(http.MethodGet, "/apis/example.apiserver.k8s.io/v1/pods?"+query, nil).WithContext(ctx)
		req.Header.Set("Accept", "application/json")
		rw := httptest.NewRecorder()
		func() {
			defer func() {
				if x := recover(); x != nil {
					rw.Code = -1
				}
			}()
			w.ServeHTTP(rw, req)
		}()
		_ = json.Unmarshal(rw.Body.Bytes(), &list)
		return rw.Code, list
	}
	code, now := get("")
	for n := 0; code == http.StatusTooManyRequests && n < 10; n++ { // memory is late
		code, now = get("")
	}
	rev, err := strconv.ParseInt(now.ResourceVersion, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	for d := range int64(8) {
		query := fmt.Sprintf("labelSelector=x!%%3Dy&resourceVersionMatch=Exact&resourceVersion=%d", rev-d)
		if _, list := get(query); len(list.Items) != 1 {
			continue // the first object belongs to a version that is not cached
		}
		armed = true
		for range 10 {
			if code, _ := get(query); code != -1 {
				t.Fatalf("code %d, want a panic", code)
			}
		}
		armed = false
		if code, list := get(query); code != http.StatusOK || len(list.Items) != 1 {
			t.Errorf("after the panics: %d, %d items", code, len(list.Items))
		}
		return
	}
	t.Fatal("no revision had one object")
}
