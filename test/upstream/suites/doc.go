// Suites runs test suites of other projects on upstream's storage layer and on Strata's, compares
// the verdicts test by test, and writes docs/conformance.md.
//
// A Suite is one entry of the list in main.go. It names its units (packages, usually), builds each,
// and runs it on one engine; the verdicts of a run are a map from test to Verdict. All else is
// common to the suites:
//
//	build unit ─▶ run on each engine ─▶ retry disputed tests on each engine ─▶ compare ─▶ known findings ─▶ report
//
// A test is disputed if it failed or is missing on an engine, or if the engines differ. A finding
// is a test whose verdicts differ after that, or that failed on every engine. It fails the run
// unless it is one of the known findings (known.go); so does a known finding that no longer occurs,
// and a unit whose tests started no server with the engine.
//
// The module is outside the workspace and has no dependencies: suites build their programs in
// modules of their own, below bin/suites, which has copies of test code of other projects; they are
// never committed.
package main
