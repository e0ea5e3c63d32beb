package testbin

import "testing"

// TestHashEnvVar_Names_AreThoseOfTestrun: tools/testrun, in another module, sets the variable.
func TestHashEnvVar_Names_AreThoseOfTestrun(t *testing.T) {
	if got := HashEnvVar("stock/etcd-3.5"); got != "STRATA_TEST_HASH_STOCK_ETCD_3_5" {
		t.Errorf("%s", got)
	}
}
