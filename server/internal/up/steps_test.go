package up

import (
	"bytes"
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stratakube/strata/kube/kubestorage"
)

// While the API server starts, the terminal shows the objects that it has loaded, and then where
// the log is.
func TestLoading_SlowStart_ShowsObjects(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		show := newStepPrinter(&out)
		var load loading
		stop := show.waiting(func() string { return load.text(t.Context(), "the.log") })
		time.Sleep(2500 * time.Millisecond)
		state := kubestorage.LoadState{Loading: true, Resource: "pods", Objects: 5, Total: 9}
		load.begin(func(context.Context) kubestorage.LoadState { return state })
		time.Sleep(5 * time.Second)
		state = kubestorage.LoadState{Objects: 9, Total: 9}
		time.Sleep(5 * time.Second)
		stop()
		show.step("ready")
		want := []string{
			"   2.00s  API server: not ready yet; see the.log",
			"   7.00s  API server: loading objects from etcd: 5 of 9, at pods",
			"  12.00s  API server: not ready yet; see the.log",
			"  12.50s  ready",
		}
		if got := strings.Split(strings.TrimRight(out.String(), "\n"), "\n"); strings.Join(got, "\n") != strings.Join(want, "\n") {
			t.Errorf("printed\n%s\nwant\n%s", out.String(), strings.Join(want, "\n"))
		}
	})
}
