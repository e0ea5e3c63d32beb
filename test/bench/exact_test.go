package main

import (
	"bytes"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestRevisionMarks_MatchHeadOfList(t *testing.T) {
	list := &corev1.ConfigMapList{ListMeta: metav1.ListMeta{ResourceVersion: "4711"}, Items: make([]corev1.ConfigMap, 100)}
	protobuf, err := list.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	for name, body := range map[string]string{
		"JSON":     `{"kind":"ConfigMapList","apiVersion":"v1","metadata":{"resourceVersion":"4711"},"items":[` + strings.Repeat(" ", headBytes) + `]}`,
		"protobuf": string(protobuf),
	} {
		head := headReader{r: iotest.OneByteReader(strings.NewReader(body))}
		if read, err := io.ReadAll(&head); err != nil || string(read) != body {
			t.Fatalf("%s: read %d bytes, %v", name, len(read), err)
		}
		if string(head.head) != body[:headBytes] {
			t.Errorf("%s: the head is %q", name, head.head)
		}
		for revision, want := range map[int64]bool{4711: true, 471: false, 47110: false, 4712: false} {
			says := slices.ContainsFunc(revisionMarks(revision), func(mark string) bool { return bytes.Contains(head.head, []byte(mark)) })
			if says != want {
				t.Errorf("%s: revision %d: %v, want %v", name, revision, says, want)
			}
		}
	}
}
