package list

import (
	"context"
	"math"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/mirror"
)

// request is a validated LIST.
type request struct {
	key  string
	opts storage.ListOptions // the token, if there is one, in upstream's plain form
	// prefix is the etcd key prefix, scope the prefix that tokens are relative to.
	prefix, scope string
	start         string          // key, after a token
	exact         mirror.Revision // above 0: exactly at this revision
}

// request validates a LIST of the resource. Errors are for the client: 400, and those of a token
// that cannot be opened (410, 429).
func (env *Env) request(ctx context.Context, key string, opts storage.ListOptions) (q request, err error) {
	q = request{key: key, opts: opts}
	if q.prefix, err = env.Keys.Prepare(key, opts.Recursive); err != nil {
		return q, err
	}
	if q.opts, err = env.Pages.Open(ctx, q.prefix, opts); err != nil {
		return q, err
	}
	// upstream takes a negative limit for no limit
	q.opts.Predicate.Limit = max(q.opts.Predicate.Limit, 0)
	if q.exact, q.start, err = storage.ValidateListOptions(q.prefix, versioner, q.opts); err != nil {
		return q, err
	}
	if q.exact < 0 { // the client's number exceeds int64: a revision in the future
		q.exact = math.MaxInt64
	}
	q.scope = env.Keys.Scope(ctx, q.prefix, q.opts)
	if !strings.HasSuffix(key, "/") {
		// Upstream's cacher makes tokens relative to the requested key, its etcd3 store relative to
		// one that ends with a slash. Both accept either; ours are those of the cacher.
		q.scope = strings.TrimSuffix(q.scope, "/")
	}
	return q, nil
}

// After returns the end of the range of the keys that begin with prefix: the smallest key above
// them. The prefix is not empty, and its last byte is not 0xff.
func After(prefix string) string {
	return prefix[:len(prefix)-1] + string(prefix[len(prefix)-1]+1)
}

// bounds returns the key range of the list.
func (q *request) bounds() (start, end string) {
	switch {
	case !q.opts.Recursive:
		return q.prefix, q.prefix + "\x00"
	case q.start != "":
		return q.start, After(q.prefix)
	}
	return q.prefix, After(q.prefix)
}

// fromMemory reports whether the gates allow memory to answer the list.
func (q *request) fromMemory(env *Env) bool {
	switch {
	case q.exact > 0:
		// Above the published revision only a consistent read shows whether the revision exists.
		return env.Gates.AtRevision && (env.Gates.Latest || q.exact <= env.Mirror.PublishedRevision())
	case q.opts.Predicate.Continue != "": // a token for the latest state
		return env.Gates.AtRevision && env.Gates.Latest
	case q.opts.ResourceVersion == "":
		return env.Gates.Latest
	}
	return true
}

// limit returns the requested number of selected objects, 0 for all.
func (q *request) limit() int64 {
	if q.opts.ResourceVersion == "0" && q.exact == 0 && q.opts.Predicate.Continue == "" {
		return 0 // KEP-2340: resource version 0 ignores the limit
	}
	return q.opts.Predicate.Limit
}

// reason returns the metric label for the revision of the list.
func (q *request) reason() string {
	continued := q.opts.Predicate.Continue != "" && q.opts.Recursive
	switch {
	case continued && q.exact > 0:
		return metrics.ReasonContinue
	case continued:
		return metrics.ReasonInconsistent
	case q.exact > 0 && q.opts.ResourceVersionMatch == metav1.ResourceVersionMatchExact:
		return metrics.ReasonExact
	case q.exact > 0:
		return metrics.ReasonLegacy
	case q.opts.ResourceVersion == "":
		return metrics.ReasonConsistent
	case q.opts.ResourceVersion == "0":
		return metrics.ReasonAny
	}
	return metrics.ReasonNotOlder
}
