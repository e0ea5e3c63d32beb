package main

import (
	"net/http"
	"net/http/httptest"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

func TestAdmissionHandler_ServesAgnhostPaths(t *testing.T) {
	pod := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Args: []string{"webhook", "--port=8444"}}}}}
	serve, err := handler(pod)()
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]int{"/readyz": http.StatusOK, "/mutating-configmaps": http.StatusBadRequest, "/none": http.StatusNotFound} {
		answer := httptest.NewRecorder()
		request := httptest.NewRequest(http.MethodPost, path, http.NoBody)
		request.Header.Set("Content-Type", "application/json")
		serve.ServeHTTP(answer, request)
		if answer.Code != want {
			t.Errorf("%s: %d, want %d", path, answer.Code, want)
		}
	}
	if handler(&corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Args: []string{"pause"}}}}}) != nil {
		t.Error("a pod that is no webhook has a handler")
	}
}
