package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/stratakube/strata/test/bench/internal/target"
)

// protobufType is the media type of requests and answers, as kubelets and controllers use it.
const protobufType = "application/vnd.kubernetes.protobuf"

var serializer = protobuf.NewSerializer(scheme.Scheme, scheme.Scheme)

// send sends obj, unless nil, and decodes the answer into a new object, which it returns.
func send(ctx context.Context, conn *target.Conn, method, path string, obj runtime.Object, status int) (runtime.Object, error) {
	request := target.Request{Method: method, Path: path, Accept: protobufType, Status: status}
	if obj != nil {
		var body bytes.Buffer
		if err := serializer.Encode(obj, &body); err != nil {
			return nil, fmt.Errorf("%s %s: %w", method, path, err)
		}
		request.Body, request.ContentType = body.Bytes(), protobufType
	}
	return answer(ctx, conn, request)
}

// patch sends a strategic merge patch, as kubelets do.
func patch(ctx context.Context, conn *target.Conn, path string, change any) (runtime.Object, error) {
	body, err := json.Marshal(change)
	if err != nil {
		return nil, fmt.Errorf("PATCH %s: %w", path, err)
	}
	return answer(ctx, conn, target.Request{Method: http.MethodPatch, Path: path, Accept: protobufType, Body: body, ContentType: "application/strategic-merge-patch+json"})
}

func answer(ctx context.Context, conn *target.Conn, request target.Request) (runtime.Object, error) {
	var body bytes.Buffer
	if err := conn.Read(ctx, request, &body); err != nil {
		return nil, err
	}
	obj, _, err := scheme.Codecs.UniversalDeserializer().Decode(body.Bytes(), nil, nil)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", request.Method, request.Path, err)
	}
	return obj, nil
}

// discard sends a request and reads the answer without decoding it.
func discard(ctx context.Context, conn *target.Conn, method, path string, status int) error {
	return conn.Read(ctx, target.Request{Method: method, Path: path, Accept: protobufType, Status: status}, new(bytes.Buffer))
}
