package kubestorage

import (
	"bytes"
	"encoding/json"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// protobufPrefix is what an object that is stored as protobuf begins with.
var protobufPrefix = []byte("k8s\x00")

// createdAt returns the creationTimestamp of a stored object, whatever its kind, if it can be
// read: an encrypted one cannot. It is rounded up, since that of an object is rounded down.
func createdAt(value []byte) (time.Time, bool) {
	var object metav1.PartialObjectMetadata
	if rest, ok := bytes.CutPrefix(value, protobufPrefix); ok {
		var unknown runtime.Unknown
		if unknown.Unmarshal(rest) != nil || object.Unmarshal(unknown.Raw) != nil {
			return time.Time{}, false
		}
	} else if !bytes.HasPrefix(value, []byte("{")) || json.Unmarshal(value, &object) != nil {
		return time.Time{}, false
	}
	at := object.CreationTimestamp
	return at.Add(time.Second), !at.IsZero()
}
