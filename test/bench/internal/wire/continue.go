package wire

import "bytes"

var continueMarker = []byte(`"continue":"`)

// continueWithin is how far into the JSON of a list its metadata may reach: it comes first, and its
// longest part is the token.
const continueWithin = 8 << 10

// Continue returns the continue token in the JSON of a page, and "" on the last page. It is in the
// list's own metadata, before any object. Tokens need no escapes, neither in JSON nor in a query.
func Continue(page []byte) string {
	_, after, found := bytes.Cut(page[:min(len(page), continueWithin)], continueMarker)
	if !found {
		return ""
	}
	token, _, _ := bytes.Cut(after, []byte(`"`))
	return string(token)
}
