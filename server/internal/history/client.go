package history

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/resource"
	"k8s.io/client-go/rest"

	"github.com/stratakube/strata/internal/statusline"
	"github.com/stratakube/strata/kube/revisiontimes"
)

const (
	jsonMedia  = "application/json"
	tableMedia = "application/json;as=Table;v=v1;g=meta.k8s.io"

	// pageSize is the number of objects of a page, as in kubectl.
	pageSize = 500
	// stalledWatches bounds the watches in sequence that end without progress.
	stalledWatches = 5
	// watchSeconds is the time of a watch. A server sends a bookmark two seconds before it ends a
	// watch; a watch of two seconds that begins in the past gets it as soon as it has caught up.
	// retrySeconds is the time of a watch after one that has confirmed nothing: the server was
	// behind, and sends the bookmark after a second.
	watchSeconds = "2"
	retrySeconds = "3"
)

// client reads the history of a server. It may be used concurrently.
type client struct {
	rest      *rest.RESTClient
	config    *rest.Config
	flags     *genericclioptions.ConfigFlags
	namespace string // of the kubeconfig or the flags
	errOut    io.Writer
}

func newClient(config *rest.Config, flags *genericclioptions.ConfigFlags, errOut io.Writer) (*client, error) {
	config = rest.CopyConfig(config)
	config.WarningHandler = rest.NoWarnings{} // of deprecated resources
	config.GroupVersion = &schema.GroupVersion{}
	config.NegotiatedSerializer = resource.UnstructuredPlusDefaultContentConfig().NegotiatedSerializer
	r, err := rest.UnversionedRESTClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", config.Host, err)
	}
	namespace, _, err := flags.ToRawKubeConfigLoader().Namespace()
	if err != nil {
		return nil, fmt.Errorf("read the namespace of the kubeconfig: %w", err)
	}
	return &client{rest: r, config: config, flags: flags, namespace: namespace, errOut: errOut}, nil
}

// target is a selection of the objects of one resource.
type target struct {
	mapping   *meta.RESTMapping
	namespace string // "" for all, and for resources without namespaces
	name      string // "" for all
	selector  string // of labels
}

// resource is the name of the resource, with its group.
func (t target) resource() string { return t.mapping.Resource.GroupResource().String() }

// kind is the prefix of the names of objects, as kubectl prints them.
func (t target) kind() string {
	return strings.ToLower(schema.GroupKind{Group: t.mapping.GroupVersionKind.Group, Kind: t.mapping.GroupVersionKind.Kind}.String())
}

func (t target) String() string {
	if t.name == "" {
		return t.resource()
	}
	return t.kind() + "/" + t.name
}

// where names the namespace of the target, in messages.
func (t target) where() string {
	if t.namespace == "" {
		return ""
	}
	return fmt.Sprintf(" in namespace %q", t.namespace)
}

// path returns the path of the list.
func (t target) path() string {
	parts := []string{"", "apis", t.mapping.Resource.Group, t.mapping.Resource.Version}
	if t.mapping.Resource.Group == "" {
		parts = []string{"", "api", t.mapping.Resource.Version}
	}
	if t.namespace != "" {
		parts = append(parts, "namespaces", t.namespace)
	}
	return strings.Join(append(parts, t.mapping.Resource.Resource), "/")
}

// request returns a request of the list. A list of one name needs no more rights than the name
// gives.
func (c *client) request(t target, accept string) *rest.Request {
	r := c.rest.Get().AbsPath(t.path()).SetHeader("Accept", accept)
	if t.name != "" {
		r.Param("fieldSelector", fields.OneTermEqualSelector("metadata.name", t.name).String())
	}
	if t.selector != "" {
		r.Param("labelSelector", t.selector)
	}
	return r
}

// raw returns the body of a response, or the status that the server has sent.
func raw(result rest.Result) ([]byte, error) {
	if err := result.Error(); err != nil {
		return nil, err
	}
	return result.Raw()
}

// errNoHistory: the server has no history of the resource, for it is not Strata, or does not cache
// the resource.
var errNoHistory = errors.New("no history")

// times returns the revisions of the target's resource that the server can read.
func (c *client) times(ctx context.Context, t target) (*revisiontimes.RevisionTimes, error) {
	data, err := raw(c.request(t, revisiontimes.MediaType).Do(ctx))
	if apierrors.IsNotAcceptable(err) {
		return nil, c.noHistory(t, "406 Not Acceptable")
	}
	if err != nil {
		return nil, fmt.Errorf("read the history of %s: %w", t.resource(), err)
	}
	times := &revisiontimes.RevisionTimes{}
	if err := json.Unmarshal(data, times); err != nil || times.Kind != revisiontimes.Kind {
		return nil, c.noHistory(t, "an answer of another kind")
	}
	return times, nil
}

func (c *client) noHistory(t target, answer string) error {
	return fmt.Errorf("read the history of %s: %w: %s is not a Strata server, or does not cache the resource (%s); "+
		"use a server of `strata apiserver` or `strata up` with --engine=strata", t.resource(), errNoHistory, c.config.Host, answer)
}

// list reads the target at a revision, page by page, and calls each with the bytes of every page.
func (c *client) list(ctx context.Context, t target, revision int64, accept string, each func([]byte) error) error {
	token := ""
	for {
		r := c.request(t, accept).Param("limit", strconv.Itoa(pageSize))
		if token != "" {
			r.Param("continue", token)
		} else {
			r.Param("resourceVersion", strconv.FormatInt(revision, 10)).Param("resourceVersionMatch", string(metav1.ResourceVersionMatchExact))
		}
		data, err := raw(r.Do(ctx))
		if err != nil {
			return c.failed(ctx, "list", t, revision, err)
		}
		var head struct {
			Metadata metav1.ListMeta `json:"metadata"`
		}
		if err := json.Unmarshal(data, &head); err != nil {
			return fmt.Errorf("list %s at revision %d: decode the response: %w", t, revision, err)
		}
		if err := each(data); err != nil {
			return err
		}
		if token = head.Metadata.Continue; token == "" {
			return nil
		}
	}
}

// failed describes a failed read of a revision; one that has left the history meanwhile with the
// oldest revision.
func (c *client) failed(ctx context.Context, verb string, t target, revision int64, err error) error {
	if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		if times, timesErr := c.times(ctx, t); timesErr == nil && times.Check(revision) != nil {
			err = times.Check(revision)
		}
	}
	return fmt.Errorf("%s %s at revision %d: %w", verb, t, revision, err)
}

// objects lists the target at a revision, and counts the objects in the step of shown.
func (c *client) objects(ctx context.Context, t target, revision int64, shown *statusline.Steps) ([]*unstructured.Unstructured, error) {
	var all []*unstructured.Unstructured
	err := c.list(ctx, t, revision, jsonMedia, func(data []byte) error {
		list := &unstructured.UnstructuredList{}
		if err := list.UnmarshalJSON(data); err != nil {
			return fmt.Errorf("list %s at revision %d: decode the response: %w", t, revision, err)
		}
		for i := range list.Items {
			all = append(all, &list.Items[i])
		}
		countPage(shown, len(all), list.GetRemainingItemCount())
		return nil
	})
	return all, err
}

// countPage sets the count of a step to the items of a list so far, and its total if the server has
// sent the number of the remaining ones.
func countPage(shown *statusline.Steps, items int, remaining *int64) {
	shown.Set(items)
	if remaining != nil {
		shown.Of(items + int(*remaining))
	}
}

// event is one event of a watch. The revision is that of the change, also of a deletion.
type event struct {
	kind     string // ADDED, MODIFIED, DELETED
	revision int64
	object   *unstructured.Unstructured
}

// events calls each for every event of the target with from < revision <= to, in order. The
// revision to must not be in the future. Unless the last of them is at to, the server confirms
// their end with a bookmark.
func (c *client) events(ctx context.Context, t target, from, to int64, each func(event) error) error {
	err := readFrames(ctx, func() *rest.Request { return c.request(t, jsonMedia) }, from, to, func(f frame) error {
		e := event{kind: f.Type, revision: f.revision, object: &unstructured.Unstructured{}}
		if err := e.object.UnmarshalJSON(f.Object); err != nil {
			return fmt.Errorf("decode an event: %w", err)
		}
		return each(e)
	})
	if err != nil && ctx.Err() == nil {
		return c.failed(ctx, "watch", t, from, err)
	}
	return err
}

// frame is an event of a watch, encoded.
type frame struct {
	Type     string          `json:"type"`
	Object   json.RawMessage `json:"object"`
	revision int64
}

// readFrames calls each for the frames of watches with from < revision <= to, without bookmarks.
// request returns the request of the list.
func readFrames(ctx context.Context, request func() *rest.Request, from, to int64, each func(frame) error) error {
	for position, stalled := from, 0; position < to; {
		seconds := watchSeconds
		if stalled > 0 {
			seconds = retrySeconds
		}
		reached, err := watchOnce(ctx, request().Param("timeoutSeconds", seconds), position, to, each)
		if err != nil {
			return err
		}
		if stalled++; reached > position {
			stalled = 0
		}
		if stalled == stalledWatches {
			return fmt.Errorf("the server has confirmed revision %d, but not revision %d; try again", position, to)
		}
		position = reached
	}
	return nil
}

// watchOnce watches until the server ends the watch, or until the watch has reached the revision
// to. It returns the position that it has reached.
func watchOnce(ctx context.Context, request *rest.Request, from, to int64, each func(frame) error) (int64, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	body, err := request.Param("watch", "true").Param("resourceVersion", strconv.FormatInt(from, 10)).
		Param("allowWatchBookmarks", "true").Stream(ctx)
	if err != nil {
		return 0, err
	}
	defer body.Close()
	position := from
	for decoder := json.NewDecoder(body); position < to; {
		f, err := decodeFrame(decoder)
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			return position, ctx.Err()
		case err != nil:
			return 0, err
		}
		if f.Type != "BOOKMARK" && f.revision <= to {
			if err := each(f); err != nil {
				return 0, err
			}
		}
		position = max(position, f.revision)
	}
	return position, nil
}

// decodeFrame reads the next frame. One of type ERROR is returned as an error.
func decodeFrame(decoder *json.Decoder) (frame, error) {
	var f frame
	if err := decoder.Decode(&f); err != nil {
		return f, err
	}
	if f.Type == "ERROR" {
		status := metav1.Status{}
		if err := json.Unmarshal(f.Object, &status); err != nil {
			return f, fmt.Errorf("decode an error event: %w", err)
		}
		return f, &apierrors.StatusError{ErrStatus: status}
	}
	var head struct {
		Metadata struct {
			ResourceVersion string `json:"resourceVersion"`
		} `json:"metadata"`
	}
	if err := json.Unmarshal(f.Object, &head); err != nil {
		return f, fmt.Errorf("decode an event: %w", err)
	}
	var err error
	if f.revision, err = strconv.ParseInt(head.Metadata.ResourceVersion, 10, 64); err != nil {
		return f, fmt.Errorf("decode an event: resource version %q: %w", head.Metadata.ResourceVersion, err)
	}
	return f, nil
}
