package freshness

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/mirror"
)

// TestWaiter_EtcdRestored_IsNotReady: the read that finds a restored etcd reports that the storage
// is not ready, as later ones do. It does not report that memory cannot keep up.
func TestWaiter_EtcdRestored_IsNotReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := podtest.New(t)
		w := New(c.Mirror, c.Resource, schema.GroupResource{Resource: "pods"}, false)
		was := c.Put(t, podtest.Pod("a"))
		c.CatchUp(t)
		c.Etcd.Stall(true) // the feed does not find it
		c.Etcd.FailLists(errors.New("not yet"))
		c.Etcd.Restore(was-1, nil)
		if err := w.Consistent(t.Context(), nil); !errors.Is(err, mirror.ErrNotReady) {
			t.Errorf("got %v, want ErrNotReady", err)
		}
	})
}

// TestOutage_RetryAfter_Grows: the Retry-After of refusals is 1 s at first and 30 s at last; a new
// outage starts at 1 s again.
func TestOutage_RetryAfter_Grows(t *testing.T) {
	var o outage
	start := time.Now()
	for _, c := range []struct{ after, want time.Duration }{
		{0, time.Second},
		{5 * time.Second, time.Second},
		{12 * time.Second, 2 * time.Second},
		{30 * time.Second, 6 * time.Second},
		{time.Minute, 30 * time.Second},
		{time.Minute + outageGap, 30 * time.Second},
		{time.Hour, time.Second},
		{time.Hour + 12*time.Second, 2 * time.Second},
	} {
		if got := o.refuse(start.Add(c.after)); got != c.want {
			t.Errorf("after %s the pause is %s, want %s", c.after, got, c.want)
		}
	}
}
