package consistency

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"hash/fnv"
	"net/http"
	"strconv"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/stratakube/strata/mirror"
)

// Path is where servers mount Handler.
const Path = "/debug/strata/consistency"

// Handler returns a handler that answers with results as JSON: an object whose items are Results.
// checkers is called for each request.
//
//	GET                    the last check of each resource
//	GET ?revision=N        the hash of memory at a revision; etcd is not read
//	POST                   check now
//	... resource=R[.group] only that resource
//
// Results contain the names of objects, but not their contents. The handler does not authorize
// requests: mount it behind filters that do.
func Handler(checkers func() Checkers) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		q, all := r.URL.Query(), checkers()
		var only *schema.GroupResource
		if name := q.Get("resource"); name != "" {
			resource := schema.ParseGroupResource(name)
			if only = &resource; !all.serves(resource) {
				http.Error(w, fmt.Sprintf("resource %q is not served from memory", name), http.StatusNotFound)
				return
			}
		}
		var answer struct {
			Items []Result `json:"items"`
		}
		switch {
		case r.Method == http.MethodPost && q.Has("revision"):
			http.Error(w, "POST checks the latest revision and does not accept the parameter revision; use GET for the hash at a revision", http.StatusBadRequest)
			return
		case r.Method == http.MethodPost:
			var err error
			answer.Items, err = all.Check(r.Context(), only)
			if r.Context().Err() != nil {
				return // the client is gone, or a filter has answered
			}
			if err != nil {
				status := http.StatusServiceUnavailable
				if errors.Is(err, ErrOff) {
					status = http.StatusForbidden
				}
				http.Error(w, err.Error(), status)
				return
			}
		case r.Method != http.MethodGet && r.Method != http.MethodHead:
			w.Header().Set("Allow", "GET, HEAD, POST")
			http.Error(w, "method not allowed: use GET, HEAD or POST", http.StatusMethodNotAllowed)
			return
		case q.Has("revision"):
			rev, err := strconv.ParseInt(q.Get("revision"), 10, 64)
			if err != nil || rev < 1 {
				http.Error(w, fmt.Sprintf("invalid revision %q: must be a positive integer", q.Get("revision")), http.StatusBadRequest)
				return
			}
			answer.Items = all.Hashes(rev, only)
		default:
			answer.Items = all.Last(only)
		}
		if answer.Items == nil {
			answer.Items = []Result{} // not null
		}
		body, err := json.MarshalIndent(answer, "", "  ")
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(append(body, '\n')) // an error is the client's
	})
}

// Result is the outcome of one comparison (KEP-4988).
type Result struct {
	Group    string `json:"group"`
	Resource string `json:"resource"`
	// Revision is the compared or hashed revision.
	Revision int64 `json:"revision,omitempty"`
	// Keys is the number of objects in memory at the revision.
	Keys int `json:"keys"`
	// Hash is that of memory: FNV-64 over namespace, name and resource version of each object,
	// joined by slashes, in hexadecimal. Servers whose hashes of one revision differ do not have
	// the same objects.
	Hash string `json:"hash,omitempty"`
	// Status is success, failure (memory differs from etcd) or error (the comparison failed); "" if
	// etcd was not read.
	Status string `json:"status,omitempty"`
	Error  string `json:"error,omitempty"`

	// For a failure: etcd's hash, the number of differing objects, and the first of them, as
	// namespace/name: those missing in memory, those missing in etcd, and those with another
	// revision.
	EtcdHash    string   `json:"etcdHash,omitempty"`
	Differences int      `json:"differences,omitempty"`
	Missing     []string `json:"missing,omitempty"`
	Extra       []string `json:"extra,omitempty"`
	Differing   []string `json:"differing,omitempty"`
	// Repaired: the differing objects were read again. Otherwise the resource is being relisted.
	Repaired bool `json:"repaired,omitempty"`

	Time    metav1.Time `json:"time"`
	Seconds float64     `json:"seconds"`
}

// hash sets the hash, the revision and the number of keys of a snapshot.
func (r *Result) hash(prefix string, s mirror.Snapshot) {
	d := newDigest(prefix)
	for e := range s.All("", "") {
		d.key = append(d.key[:0], e.Key()...)
		d.add(d.key, e.ModRevision())
		r.Keys++
	}
	r.Revision, r.Hash = s.Rev, d.sum()
}

// digest is KEP-4988's hash of a list, computed from keys: those of namespaced objects end with
// namespace and name, those of others with the name.
type digest struct {
	hash   hash.Hash64
	prefix int
	buf    []byte
	key    []byte // scratch for callers that have a string key
}

func newDigest(prefix string) *digest { return &digest{hash: fnv.New64(), prefix: len(prefix)} }

// add adds an object to the hash. Cost is O(length of the key), no allocation.
func (d *digest) add(key []byte, mod mirror.Revision) {
	key = key[d.prefix:]
	d.buf = d.buf[:0]
	if bytes.IndexByte(key, '/') < 0 {
		d.buf = append(d.buf, '/') // no namespace
	}
	d.buf = append(append(d.buf, key...), '/')
	d.buf = strconv.AppendInt(d.buf, mod, 10)
	_, _ = d.hash.Write(d.buf)
}

func (d *digest) sum() string { return strconv.FormatUint(d.hash.Sum64(), 16) }
