package wire

import (
	"strings"
	"testing"
)

func TestContinue_ReturnsTokenOfListMetadata(t *testing.T) {
	long := strings.Repeat("x", 2*continueWithin)
	for page, want := range map[string]string{
		"": "",
		`{"kind":"ConfigMapList","metadata":{"resourceVersion":"5"},"items":[]}`:                                                 "",
		`{"kind":"ConfigMapList","metadata":{"resourceVersion":"5","continue":"eyJ2_-","remainingItemCount":3},"items":[]}`:      "eyJ2_-",
		`{"kind":"ConfigMapList","metadata":{"resourceVersion":"5","continue":"abc"},"items":[{"data":{"d":"` + long + `"}}]}`:   "abc",
		`{"kind":"ConfigMapList","metadata":{},"items":[{"data":{"d":"` + long + `","continue":"not a token"}}]}`:                "",
		`{"kind":"ConfigMapList","metadata":{},"items":[{"data":{"d":"a string with \"continue\":\"quotes\" does not match"}}]}`: "",
	} {
		if got := Continue([]byte(page)); got != want {
			t.Errorf("%.100s: got %q, want %q", page, got, want)
		}
	}
}
