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

	"github.com/stratakube/strata/test/harness"
)

// aspect is one compared property of an answer.
type aspect string

const (
	code      aspect = "code"
	reason    aspect = "reason"
	message   aspect = "message" // without its variable parts; with causes and hints
	items     aspect = "items"   // with their resource versions
	version   aspect = "resourceVersion"
	more      aspect = "continue"
	remaining aspect = "remainingItemCount"
	events    aspect = "events"
	etcd      aspect = "etcd" // reads of etcd for the request
)

// aspects is an answer, or an expected answer; missing aspects are not compared.
type aspects map[aspect]string

// answer is a server's answer. The resource version is not an aspect yet: a rule has to judge it.
type answer struct {
	aspects
	version int64 // 0 for none
}

// rule is the condition on the resource version of an answer.
type rule struct {
	exactly int64
	least   int64 // minimum, if not exact
}

// show returns the resource version as an aspect: whether it satisfies the rule.
func (r rule) show(revision int64) string {
	switch {
	case r == rule{}:
		return "none"
	case r.exactly != 0 && revision == r.exactly, r.exactly == 0 && revision >= r.least:
		return r.String()
	}
	return fmt.Sprint(revision)
}

// String is show's result for a resource version that satisfies the rule.
func (r rule) String() string {
	if r.exactly != 0 {
		return fmt.Sprintf("exactly %d", r.exactly)
	}
	return fmt.Sprintf("%d or later", r.least)
}

// differences describes the aspects in which got differs from want, which may have fewer aspects.
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
		a.aspects[message] += " [the header Retry-After does not match the status]"
	}
	return a
}

var (
	numbers = regexp.MustCompile(`[0-9]+`)
	quoted  = regexp.MustCompile(`"[^"]*"`)
)

// class returns a status without its variable parts.
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

// listAnswer returns the answer to a LIST.
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

// objectAnswer returns the answer to a GET.
func objectAnswer(resp *harness.Response) (answer, error) {
	var o harness.Object
	if err := json.Unmarshal(resp.Body, &o); err != nil {
		return answer{}, err
	}
	revision, err := strconv.ParseInt(o.Metadata.ResourceVersion, 10, 64)
	return answer{version: revision, aspects: aspects{code: fmt.Sprint(resp.Code), items: show(o)}}, err
}

// show is object.String for an object in a response.
func show(o harness.Object) string { return o.Key() + "@" + o.Metadata.ResourceVersion }

func showAll(objects []harness.Object) string {
	texts := make([]string, 0, len(objects))
	for _, o := range objects {
		texts = append(texts, show(o))
	}
	return strings.Join(texts, " ")
}

// expectation is the answer that a row of a table requires.
type expectation struct {
	row string // of docs/keps.md, or the error in the request
	aspects
	rule
	reads reads
}

// refused expects that a request is refused without a read of etcd.
func refused(row string, status int, why metav1.StatusReason) expectation {
	return expectation{row: row, aspects: aspects{code: fmt.Sprint(status), reason: string(why)}}
}

// tooLarge expects that a request waits for a revision in vain; the answer has a hint to retry.
func tooLarge(row string, asked reads) expectation {
	e := refused(row, http.StatusGatewayTimeout, metav1.StatusReasonTimeout)
	e.reads = asked
	return e
}
