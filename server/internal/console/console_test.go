package console

import (
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"
)

func get(h http.Handler, method, path, etag string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(method, path, nil)
	if etag != "" {
		r.Header.Set("If-None-Match", etag)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func TestHandler_EveryFile_HasTypeAndPolicy(t *testing.T) {
	h, all := Handler(), files()
	if len(all) < 10 {
		t.Fatalf("%d files", len(all))
	}
	for name, f := range all {
		w := get(h, http.MethodGet, Path+"/"+name, "")
		if w.Code != http.StatusOK || f.contentType == "" || w.Header().Get("Content-Type") != f.contentType || w.Body.Len() == 0 {
			t.Errorf("%q: %d, %v", name, w.Code, w.Header())
		}
		if got := w.Header().Get("Content-Security-Policy"); !strings.HasPrefix(got, "default-src 'none'; script-src 'self';") || strings.Contains(got, "unsafe") {
			t.Errorf("%q: policy %q", name, got)
		}
		if w.Header().Get("X-Content-Type-Options") != "nosniff" || w.Header().Get("X-Frame-Options") != "DENY" || w.Header().Get("Referrer-Policy") != "no-referrer" {
			t.Errorf("%q: %v", name, w.Header())
		}
		if w := get(h, http.MethodGet, Path+"/"+name, f.etag); w.Code != http.StatusNotModified || w.Body.Len() > 0 {
			t.Errorf("%q, which the browser has: %d, %d bytes", name, w.Code, w.Body.Len())
		}
	}
}

func TestHandler_OtherRequests_AreRefused(t *testing.T) {
	h := Handler()
	if w := get(h, http.MethodGet, Path, ""); w.Code != http.StatusMovedPermanently || w.Header().Get("Location") != "console/" {
		t.Errorf("the page without a slash: %d, %v", w.Code, w.Header())
	}
	for _, path := range []string{"/none.js", "/../status", "/assets/main.js", "/uplot", "/uplot/"} {
		if w := get(h, http.MethodGet, Path+path, ""); w.Code != http.StatusNotFound || w.Header().Get("Content-Security-Policy") == "" {
			t.Errorf("%s: %d", path, w.Code)
		}
	}
	if w := get(h, http.MethodPost, Path+"/", ""); w.Code != http.StatusMethodNotAllowed {
		t.Errorf("POST: %d", w.Code)
	}
}

// TestPage_Files_NeedNoOtherServer: no file of the page names another server, and the page has no
// inline scripts or styles.
func TestPage_Files_NeedNoOtherServer(t *testing.T) {
	address := regexp.MustCompile(`(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}`)
	for name, f := range files() {
		if strings.HasPrefix(name, "uplot/") {
			continue // its comments have the address of its project
		}
		for _, found := range address.FindAllString(string(f.content), -1) {
			if found != "http://www.w3.org" { // the name of a format
				t.Errorf("%q names %s", name, found)
			}
		}
	}
	page := string(files()[""].content)
	if inline := regexp.MustCompile(`(?i)<style|<script[^>]*>[^<]|\son[a-z]+=|style=`).FindString(page); inline != "" {
		t.Errorf("the page has inline code: %q", inline)
	}
}
