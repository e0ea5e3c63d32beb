package tables

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/server/test/internal/harness"
)

// aspect is one thing about an answer that is looked at.
type aspect string

const (
	code      aspect = "code"
	reason    aspect = "reason"
	message   aspect = "message" // without what is different each time; with causes and hints
	items     aspect = "items"   // with their resource versions
	version   aspect = "resourceVersion"
	more      aspect = "continue"
	remaining aspect = "remainingItemCount"
	events    aspect = "events"
	etcd      aspect = "etcd" // what it was asked for
)

// aspects is an answer, or what is expected of one; what is not there is not looked at.
type aspects map[aspect]string

// answer is what a server answered. The resource version is no aspect yet: what it has to be is a rule.
type answer struct {
	aspects
	version int64 // 0 for none
}

// rule says what the resource version of an answer has to be.
type rule struct {
	exactly int64
	least   int64 // if not exactly
}

// show makes the resource version an aspect: whether it obeys.
func (r rule) show(revision int64) string {
	switch {
	case r == rule{}:
		return "none"
	case r.exactly != 0 && revision == r.exactly, r.exactly == 0 && revision >= r.least:
		return r.String()
	}
	return fmt.Sprint(revision)
}

// String is what show returns for a resource version that obeys.
func (r rule) String() string {
	if r.exactly != 0 {
		return fmt.Sprintf("exactly %d", r.exactly)
	}
	return fmt.Sprintf("%d or later", r.least)
}

// differences says how got differs from want, which may be about less.
func differences(got, want aspects) map[aspect]string {
	found := map[aspect]string{}
	for _, a := range slices.Sorted(maps.Keys(want)) {
		if got[a] != want[a] {
			found[a] = fmt.Sprintf("%s: %q, want %q", a, got[a], want[a])
		}
	}
	return found
}

// refusal is an answer other than 200.
func refusal(resp *harness.Response) answer {
	status := resp.Status()
	a := answer{aspects: aspects{code: fmt.Sprint(resp.Code), reason: string(status.Reason), message: class(status), more: fmt.Sprint(status.Continue != "")}}
	if status.Kind == "" {
		a.aspects[message] = "no status: " + string(resp.Body)
	}
	if (resp.Header.Get("Retry-After") != "") != (status.Details != nil && status.Details.RetryAfterSeconds > 0) {
		a.aspects[message] += " [the header Retry-After does not say what the status does]"
	}
	return a
}

var (
	numbers = regexp.MustCompile(`[0-9]+`)
	quoted  = regexp.MustCompile(`"[^"]*"`)
)

// class is what a status says, without what is different each time.
func class(status metav1.Status) string {
	text := numbers.ReplaceAllString(quoted.ReplaceAllString(status.Message, `"..."`), "N")
	if status.Details == nil {
		return text
	}
	for _, cause := range status.Details.Causes {
		text += fmt.Sprintf(" [cause %s]", cause.Type)
	}
	if status.Details.RetryAfterSeconds > 0 {
		text += " [retry later]"
	}
	return text
}

// listAnswer is a list.
func listAnswer(resp *harness.Response) (answer, error) {
	l, err := resp.List()
	if err != nil {
		return answer{}, err
	}
	left := ""
	if l.Metadata.RemainingItemCount != nil {
		left = fmt.Sprint(*l.Metadata.RemainingItemCount)
	}
	revision, err := strconv.ParseInt(l.Metadata.ResourceVersion, 10, 64)
	return answer{version: revision, aspects: aspects{
		code: fmt.Sprint(resp.Code), items: showAll(l.Items), more: fmt.Sprint(l.Metadata.Continue != ""), remaining: left,
	}}, err
}

// objectAnswer is an object.
func objectAnswer(resp *harness.Response) (answer, error) {
	var o harness.Object
	if err := json.Unmarshal(resp.Body, &o); err != nil {
		return answer{}, err
	}
	revision, err := strconv.ParseInt(o.Metadata.ResourceVersion, 10, 64)
	return answer{version: revision, aspects: aspects{code: fmt.Sprint(resp.Code), items: show(o)}}, err
}

// show is object.String for what a server has sent.
func show(o harness.Object) string { return o.Key() + "@" + o.Metadata.ResourceVersion }

func showAll(objects []harness.Object) string {
	texts := make([]string, 0, len(objects))
	for _, o := range objects {
		texts = append(texts, show(o))
	}
	return strings.Join(texts, " ")
}

// expectation is what a row of a table says of a request.
type expectation struct {
	row string // of docs/keps.md, or what is wrong with the request
	aspects
	rule
	reads reads
}

// refused is the expectation that a request is refused. Nothing is read for it.
func refused(row string, status int, why metav1.StatusReason) expectation {
	return expectation{row: row, aspects: aspects{code: fmt.Sprint(status), reason: string(why)}}
}

// tooLarge is the expectation that a request waits for a revision in vain, with a hint to try again.
func tooLarge(row string, asked reads) expectation {
	e := refused(row, http.StatusGatewayTimeout, metav1.StatusReasonTimeout)
	e.reads = asked
	return e
}
