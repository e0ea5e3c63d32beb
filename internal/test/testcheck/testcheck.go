// Package testcheck ends tests at errors that they do not expect.
package testcheck

// test is a testing.TB, or that of a property.
type test interface {
	Helper()
	Fatal(args ...any)
}

// NoError ends the test if err is not nil.
func NoError(t test, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
