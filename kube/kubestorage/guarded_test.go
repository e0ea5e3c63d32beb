package kubestorage

import (
	"errors"
	"reflect"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage"
)

// methods are the requests of storage.Interface: its methods without Versioner.
func methods(t *testing.T) (names []string) {
	of := reflect.TypeFor[storage.Interface]()
	for m := range of.Methods() {
		if m.Name != "Versioner" {
			names = append(names, m.Name)
		}
	}
	if len(names) < 12 {
		t.Fatalf("requests: %v", names)
	}
	return names
}

// call calls a method with zero values, and returns its error, and whether it has reached the
// storage none, whose methods panic.
func call(s storage.Interface, method string) (reached bool, err error) {
	defer func() { reached = recover() != nil }()
	m := reflect.ValueOf(s).MethodByName(method)
	args := make([]reflect.Value, m.Type().NumIn())
	for i := range args {
		args[i] = reflect.Zero(m.Type().In(i))
	}
	results := m.Call(args)
	err, _ = results[len(results)-1].Interface().(error)
	return false, err
}

type none struct{ storage.Interface }

func TestGuarded_RefusedRequests_ReachNoStorage(t *testing.T) {
	refused := errors.New("refused")
	refusing := guarded{func(string) (storage.Interface, error) { return nil, refused }}
	allowing := guarded{func(string) (storage.Interface, error) { return none{}, nil }}
	for _, method := range methods(t) {
		want := refused
		if method == "ReadinessCheck" || method == "CompactRevision" {
			want = nil
		}
		if reached, err := call(refusing, method); reached || !errors.Is(err, want) || (err == nil) != (want == nil) {
			t.Errorf("%s: error %v, reached %v", method, err, reached)
		}
		if reached, err := call(allowing, method); !reached {
			t.Errorf("%s does not reach the storage: %v", method, err)
		}
	}
}

func TestReadOnly_Writes_AreMethodNotAllowed(t *testing.T) {
	s := readOnly(none{}, schema.GroupResource{Resource: "pods"})
	for _, method := range methods(t) {
		write := method == "Create" || method == "Delete" || method == "GuaranteedUpdate"
		reached, err := call(s, method)
		if reached == write || write && (!errors.Is(err, ErrReadOnly) || !apierrors.IsMethodNotSupported(err)) {
			t.Errorf("%s: error %v, reached %v", method, err, reached)
		}
	}
}

// TestOpen_WritableStorage_IsNotGuarded: a guard that never refuses would cost each request a call.
func TestOpen_WritableStorage_IsNotGuarded(t *testing.T) {
	t.Parallel()
	if _, is := setup(t).engine(t).etcd.(guarded); is {
		t.Error("the storage is guarded")
	}
	if _, is := setup(t, func(o *options) { o.engine.ReadOnly = true }).engine(t).etcd.(guarded); !is {
		t.Error("the storage of a read-only engine is not guarded")
	}
}
