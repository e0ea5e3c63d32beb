package wire

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"strconv"
	"time"
)

// Event is one frame of a watch, as far as a benchmark looks into it.
type Event struct {
	Type     string // ADDED, MODIFIED, DELETED, BOOKMARK
	Revision int64
	Sent     time.Time // from the stamp in the object's data; zero if it has none
}

// maxFrameBytes bounds a frame. Objects of a benchmark have few kilobytes.
const maxFrameBytes = 64 << 10

var (
	typeMarker     = []byte(`{"type":"`)
	revisionMarker = []byte(`"resourceVersion":"`)
)

// ReadJSONEvents reads a watch in JSON, a line per event, and calls each for every event until the
// stream ends or each fails. stampKey is the key in a ConfigMap's data that contains the time at
// which it was written, in nanoseconds since 1970.
//
// It returns nil only if the server ended the stream in order and between two frames. An ERROR
// event is an error that quotes it.
func ReadJSONEvents(r io.Reader, stampKey string, each func(Event) error) error {
	stampMarker := []byte(`"` + stampKey + `":"`)
	// One event is often all there is to read, so a large buffer would only cost memory for each of
	// a thousand watchers; it must hold a frame.
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 0, 4<<10), maxFrameBytes)
	lines.Split(splitFrames)
	for lines.Scan() {
		event, err := parseJSONEvent(lines.Bytes(), stampMarker)
		if err != nil {
			return err
		}
		if err := each(event); err != nil {
			return err
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("watch broke off: %w", err)
	}
	return nil
}

// splitFrames is bufio.ScanLines, but a last line without its end is an error.
func splitFrames(data []byte, atEOF bool) (advance int, token []byte, err error) {
	if i := bytes.IndexByte(data, '\n'); i >= 0 {
		return i + 1, data[:i], nil
	}
	if atEOF && len(data) > 0 {
		return 0, nil, fmt.Errorf("a frame is incomplete: %q", abbreviate(data))
	}
	return 0, nil, nil
}

func parseJSONEvent(line, stampMarker []byte) (Event, error) {
	rest, ok := bytes.CutPrefix(line, typeMarker)
	if !ok {
		return Event{}, fmt.Errorf("watch frame has no type: %q", abbreviate(line))
	}
	kind, rest, _ := bytes.Cut(rest, []byte(`"`))
	switch string(kind) {
	case "ADDED", "MODIFIED", "DELETED", "BOOKMARK":
	default:
		return Event{}, fmt.Errorf("watch sent %s: %q", kind, abbreviate(line))
	}
	event := Event{Type: string(kind)}
	revision, err := numberAfter(rest, revisionMarker)
	if err != nil || revision == 0 {
		return Event{}, fmt.Errorf("watch frame has no resource version: %q", abbreviate(line))
	}
	event.Revision = revision
	sent, err := numberAfter(rest, stampMarker)
	if err != nil {
		return Event{}, fmt.Errorf("watch frame has a broken stamp: %q", abbreviate(line))
	}
	if sent != 0 {
		event.Sent = time.Unix(0, sent)
	}
	return event, nil
}

// numberAfter returns the quoted number behind the first marker in b, and 0 if there is no marker.
func numberAfter(b, marker []byte) (int64, error) {
	_, after, found := bytes.Cut(b, marker)
	if !found {
		return 0, nil
	}
	digits, _, _ := bytes.Cut(after, []byte(`"`))
	return strconv.ParseInt(string(digits), 10, 64)
}

func abbreviate(b []byte) []byte {
	const limit = 300
	return b[:min(len(b), limit)]
}
