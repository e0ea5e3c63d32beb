package enginetest

import (
	"testing"

	"github.com/stratakube/strata/etcdsource/contracttest"
)

// TestContract_EmbeddedEtcd_MeetsEveryRequirement runs the tests of docs/etcd-contract.md on the
// etcd of this module. test/e2e/api/contract runs them on other stores.
func TestContract_EmbeddedEtcd_MeetsEveryRequirement(t *testing.T) {
	t.Parallel()
	e := newEtcd(t) // not the shared one: it is compacted
	e.run(t)
	s := &contracttest.Store{Client: connect(t, e.socket()), Other: connect(t, e.socket()), Prefix: "/registry/contract/"}
	for _, r := range contracttest.Requirements() {
		t.Run(r.ID, func(t *testing.T) {
			if answer, err := r.Test(contextFor(t), s); answer != contracttest.Yes || err != nil {
				t.Errorf("%s: %q, %v; want %q", r.Name, answer, err, contracttest.Yes)
			}
		})
	}
}
