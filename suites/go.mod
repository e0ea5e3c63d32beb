module github.com/stratakube/strata/suites

go 1.26.0
