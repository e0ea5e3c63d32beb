package kubestorage

import (
	"encoding/json"
	"strconv"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/stratakube/strata/mirror"
)

// convertedBytes bounds what one served version of a custom resource keeps of
// conversions; what is beyond is converted at each read.
const convertedBytes = 64 << 20

// remember keeps a custom resource that is stored in another version than it was
// decoded to: a webhook may have converted it, which is slow, and fails when the
// webhook is down. Each entry is converted once for all its readers (D2).
func (v *view) remember(e *mirror.Entry, stored []byte, obj runtime.Object) {
	u, ok := obj.(*unstructured.Unstructured)
	if !ok || v.converted == nil || e.Memo(v.converted.slot) != nil {
		return
	}
	var was struct {
		APIVersion string `json:"apiVersion"`
	}
	if err := json.Unmarshal(stored, &was); err != nil || was.APIVersion == u.GetAPIVersion() {
		return
	}
	data, err := u.MarshalJSON()
	if err != nil || !v.converted.room(int64(len(data))) {
		return
	}
	if e.SwapMemo(v.converted.slot, nil, &encoded{data}) {
		v.converted.used.Add(int64(len(data)))
	}
}

// recall returns the entry as it was converted before, with the resource version
// rev, or nil. The object belongs to the caller.
func (v *view) recall(e *mirror.Entry, rev mirror.Revision) *unstructured.Unstructured {
	if v.converted == nil {
		return nil
	}
	enc, ok := e.Memo(v.converted.slot).(*encoded)
	if !ok {
		return nil
	}
	u := &unstructured.Unstructured{}
	if err := u.UnmarshalJSON(enc.data); err != nil {
		return nil
	}
	u.SetResourceVersion(strconv.FormatInt(rev, 10))
	return u
}
