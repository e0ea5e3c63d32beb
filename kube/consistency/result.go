package consistency

import (
	"bytes"
	"hash"
	"hash/fnv"
	"strconv"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/mirror"
)

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
