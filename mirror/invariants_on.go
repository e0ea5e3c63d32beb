//go:build strata_invariants

package mirror

const checkInvariants = true
