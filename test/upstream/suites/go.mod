module github.com/stratakube/strata/test/upstream/suites

go 1.26.0

require (
	github.com/stratakube/strata v0.0.0-00010101000000-000000000000
	golang.org/x/sync v0.24.0
)

require golang.org/x/sys v0.49.0 // indirect

replace github.com/stratakube/strata => ../../../
