//go:build !strata_invariants

package mirror

// checkInvariants: the invariants are checked after every batch, and a broken one panics. The build
// tag strata_invariants sets it.
const checkInvariants = false
