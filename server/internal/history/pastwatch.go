package history

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
)

// pastWatchTimeout ends a watch whose client names no timeout.
const pastWatchTimeout = 30 * time.Minute

// watch delivers the events of a path as the replay reaches them.
func (s *pastServer) watch(w http.ResponseWriter, ctx context.Context, p resourcePath, query url.Values, accept string) {
	timeout := pastWatchTimeout
	if seconds, err := strconv.Atoi(query.Get("timeoutSeconds")); err == nil && seconds > 0 {
		timeout = time.Duration(seconds) * time.Second
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()

	start, initial, err := s.startOf(query)
	if err != nil {
		fail(w, err)
		return
	}
	out := &frameWriter{w: w, control: http.NewResponseController(w)}
	var events []frame
	if initial {
		var objects []frame
		if objects, out.kind, err = s.initial(ctx, p, query, accept, start); err == nil {
			out.begin()
			if out.write(objects...) != nil {
				return
			}
			if query.Get("sendInitialEvents") == "true" {
				out.bookmark(start, true)
			}
			_ = out.flush()
		}
	}
	// The events are read at once: they are in memory of the server, and leave it while they are
	// replayed.
	if err == nil {
		events, err = s.frames(ctx, p, query, accept, start)
	}
	if err != nil {
		out.fail(err)
		return
	}
	out.begin()
	if len(events) > 0 && out.kind.Kind == "" {
		_ = json.Unmarshal(events[0].Object, &out.kind)
	}
	_ = out.flush() // the next write fails
	for _, f := range events {
		if s.clock.wait(ctx, f.revision) != nil || out.write(f) != nil || out.flush() != nil {
			return
		}
	}
	if s.clock.wait(ctx, s.clock.to) != nil {
		return
	}
	if query.Get("allowWatchBookmarks") == "true" {
		out.bookmark(s.clock.to, false)
		_ = out.flush()
	}
	<-ctx.Done()
}

// startOf returns the revision after which a watch begins, and whether it begins with the objects
// of that revision.
func (s *pastServer) startOf(query url.Values) (start int64, initial bool, err error) {
	now := s.clock.revision()
	from, send := query.Get("resourceVersion"), query.Get("sendInitialEvents")
	if send == "true" || send == "" && (from == "" || from == "0") {
		return now, true, nil
	}
	if from == "" || from == "0" {
		return now, false, nil
	}
	if start, err = strconv.ParseInt(from, 10, 64); err != nil {
		return 0, false, apierrors.NewBadRequest(fmt.Sprintf("resource version %q is no revision", from))
	}
	if start > now {
		return 0, false, apierrors.NewResourceExpired(fmt.Sprintf("revision %d is in the future of the replay, which is at revision %d", start, now))
	}
	return start, false, nil
}

// initial returns the objects of a revision as events, and their kind.
func (s *pastServer) initial(ctx context.Context, p resourcePath, query url.Values, accept string, revision int64) ([]frame, metav1.TypeMeta, error) {
	_, data, err := s.read(ctx, p, query, strings.ReplaceAll(accept, "as=PartialObjectMetadata;", "as=PartialObjectMetadataList;"), revision)
	if err != nil {
		return nil, metav1.TypeMeta{}, err
	}
	list, err := parseItems(data)
	if err != nil {
		return nil, metav1.TypeMeta{}, err
	}
	if list.Kind == "Table" {
		return []frame{{Type: "ADDED", Object: data}}, list.TypeMeta, nil
	}
	frames := make([]frame, len(list.Items))
	for i, item := range list.Items {
		frames[i] = frame{Type: "ADDED", Object: item}
	}
	return frames, metav1.TypeMeta{Kind: strings.TrimSuffix(list.Kind, "List"), APIVersion: list.APIVersion}, nil
}

// frameWriter writes the frames of a watch.
type frameWriter struct {
	w       http.ResponseWriter
	control *http.ResponseController
	kind    metav1.TypeMeta // of bookmarks; without a kind, no bookmark is sent
	begun   bool
}

// begin begins the answer, if it has not begun yet.
func (f *frameWriter) begin() {
	if !f.begun {
		f.begun = true
		f.w.Header().Set("Content-Type", jsonMedia)
		f.w.WriteHeader(http.StatusOK)
	}
}

// fail answers with an error: with its status, or, after the beginning, with an event.
func (f *frameWriter) fail(err error) {
	if !f.begun {
		fail(f.w, err)
		return
	}
	data, _ := json.Marshal(statusOf(err))
	_ = f.write(frame{Type: "ERROR", Object: data})
	_ = f.flush()
}

func (f *frameWriter) write(frames ...frame) error {
	encoder := json.NewEncoder(f.w)
	encoder.SetEscapeHTML(false)
	for _, frame := range frames {
		if err := encoder.Encode(frame); err != nil {
			return err
		}
	}
	return nil
}

func (f *frameWriter) flush() error { return f.control.Flush() }

// bookmark writes a bookmark at a revision, which may close the initial events.
func (f *frameWriter) bookmark(revision int64, initialEnd bool) {
	if f.kind.Kind == "" {
		return
	}
	metadata := map[string]any{"resourceVersion": strconv.FormatInt(revision, 10)}
	if initialEnd {
		metadata["annotations"] = map[string]string{metav1.InitialEventsAnnotationKey: "true"}
	}
	object := map[string]any{"kind": f.kind.Kind, "apiVersion": f.kind.APIVersion, "metadata": metadata}
	data, _ := json.Marshal(object)
	_ = f.write(frame{Type: "BOOKMARK", Object: data})
}

// frames returns the events of a path from a revision to the end of the replay.
func (s *pastServer) frames(ctx context.Context, p resourcePath, query url.Values, accept string, from int64) ([]frame, error) {
	request := func() *rest.Request {
		r := s.rest.Get().AbsPath(p.list).SetHeader("Accept", accept)
		for _, key := range []string{"labelSelector", "fieldSelector", "shardSelector", "includeObject"} {
			if value := query.Get(key); value != "" && (p.name == "" || !slices.Contains(listParams, key)) {
				r.Param(key, value)
			}
		}
		if p.name != "" {
			r.Param("fieldSelector", p.selector())
		}
		return r
	}
	var frames []frame
	if s.clock.speed == 0 {
		return nil, nil
	}
	err := readFrames(ctx, request, from, s.clock.to, func(f frame) error {
		frames = append(frames, f)
		return nil
	})
	return frames, err
}
