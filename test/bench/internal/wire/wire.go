// Package wire looks into the bodies of API servers' answers without decoding them: it counts
// objects and finds tokens and events, and a short or broken body is an error.
package wire

import (
	"bytes"
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"
)

// uidMarker occurs once in the JSON of an object that neither has an owner nor refers to another
// object, and not in the list's own metadata. Quotes are escaped within JSON strings, so data never
// looks like it.
var uidMarker = []byte(`"uid":"`)

// CountJSON returns the number of objects in the JSON of a list, by their UIDs. Items end a list,
// except that lists of custom resources, in order of their fields, end with their own metadata.
func CountJSON(body []byte) (int, error) {
	ends := []string{"]}", "null}"}
	if bytes.HasPrefix(body, []byte(`{"apiVersion":`)) {
		ends = []string{`"}}`}
	}
	for _, end := range ends {
		if bytes.HasSuffix(bytes.TrimSuffix(body, []byte("\n")), []byte(end)) {
			return bytes.Count(body, uidMarker), nil
		}
	}
	return 0, fmt.Errorf("JSON list of %d bytes ends in %q", len(body), body[max(0, len(body)-len(uidMarker)):])
}

const (
	rawOfUnknown = 2 // runtime.Unknown.raw
	itemsOfList  = 2 // of every list type of the API
)

// CountProtobuf returns the number of items in the protobuf of a list: "k8s\0", runtime.Unknown,
// list. It follows the lengths and skips the items.
func CountProtobuf(body []byte) (items int, err error) {
	unknown, ok := bytes.CutPrefix(body, []byte("k8s\x00"))
	if !ok {
		return 0, fmt.Errorf("protobuf list begins with %q, want k8s and a zero byte", body[:min(4, len(body))])
	}
	found := false
	err = eachField(unknown, func(number protowire.Number, list []byte) error {
		if number != rawOfUnknown {
			return nil
		}
		found = true
		return eachField(list, func(number protowire.Number, _ []byte) error {
			if number == itemsOfList {
				items++
			}
			return nil
		})
	})
	if err == nil && !found {
		err = fmt.Errorf("%d bytes have no list", len(body))
	}
	if err != nil {
		return items, fmt.Errorf("protobuf list, item %d: %w", items, err)
	}
	return items, nil
}

// eachField calls each for every length-delimited field of a message.
func eachField(message []byte, each func(number protowire.Number, value []byte) error) error {
	for len(message) > 0 {
		number, kind, n := protowire.ConsumeTag(message)
		if n < 0 {
			return protowire.ParseError(n)
		}
		message = message[n:]
		if n = protowire.ConsumeFieldValue(number, kind, message); n < 0 {
			return protowire.ParseError(n)
		}
		if kind == protowire.BytesType {
			value, _ := protowire.ConsumeBytes(message)
			if err := each(number, value); err != nil {
				return err
			}
		}
		message = message[n:]
	}
	return nil
}

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
