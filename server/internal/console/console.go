// Package console serves a page that shows the state of a server, and the past of its resources, in
// a browser.
//
//	browser ── GET /debug/strata/console/ ──▶ the files of the page, which are the same for every server and user
//	        ── GET /debug/strata/status, ... ──▶ the server's own endpoints and lists, behind its authentication and authorization
//
// The page only reads. Its requests have the rights of the user that sends them: behind `kubectl
// proxy`, of the user of the proxy; after a link with a one-time token (Sessions), those of a
// session that may only read. The files are served behind authorization too, except in a server
// with Sessions to clients on the loopback address: a browser cannot send a token when it opens a
// page.
package console

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"io/fs"
	"net/http"
	"path"
	"strings"

	"github.com/stratakube/strata/server/internal/console/uplot"
)

// Path is where the page is served. Its files are below it.
const Path = "/debug/strata/console"

// securityPolicy permits the page its own files and requests to its own server, and nothing else:
// no inline scripts, no strings as scripts, no frames around it.
const securityPolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

//go:embed assets
var assets embed.FS

// file is one file of the page.
type file struct {
	content     []byte
	contentType string
	etag        string
}

// types are the content types by file name extension.
var types = map[string]string{
	".html": "text/html; charset=utf-8",
	".css":  "text/css; charset=utf-8",
	".js":   "text/javascript; charset=utf-8",
	".svg":  "image/svg+xml",
	"":      "text/plain; charset=utf-8",
}

// files returns the files of the page by their path below Path. The page itself has the path "".
func files() map[string]file {
	all := map[string]file{}
	add := func(from fs.FS, dir, below string) {
		entries, err := fs.ReadDir(from, dir)
		if err != nil {
			panic(err) // embedded
		}
		for _, e := range entries {
			content, err := fs.ReadFile(from, path.Join(dir, e.Name()))
			if err != nil {
				panic(err)
			}
			sum := sha256.Sum256(content)
			name := below + e.Name()
			if name == "index.html" {
				name = ""
			}
			all[name] = file{content, types[path.Ext(e.Name())], `"` + hex.EncodeToString(sum[:8]) + `"`}
		}
	}
	add(assets, "assets", "")
	add(uplot.Files, ".", "uplot/")
	return all
}

// Handler serves the files of the page below Path. It does not authorize requests.
func Handler() http.Handler {
	all := files()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		setHeaders(w.Header())
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "method not allowed: use GET or HEAD", http.StatusMethodNotAllowed)
			return
		}
		if r.URL.Path == Path {
			// relative: a proxy may serve this below a prefix
			w.Header().Set("Location", path.Base(Path)+"/")
			w.WriteHeader(http.StatusMovedPermanently)
			return
		}
		f, ok := all[strings.TrimPrefix(r.URL.Path, Path+"/")]
		if !ok {
			http.Error(w, "the console has no such file", http.StatusNotFound)
			return
		}
		w.Header().Set("Content-Type", f.contentType)
		w.Header().Set("Etag", f.etag)
		w.Header().Set("Cache-Control", "no-cache") // the browser asks for a newer one
		if r.Header.Get("If-None-Match") == f.etag {
			w.WriteHeader(http.StatusNotModified)
			return
		}
		if r.Method == http.MethodGet {
			_, _ = w.Write(f.content) // an error is that of the client
		}
	})
}

// setHeaders sets the headers of every answer below Path.
func setHeaders(h http.Header) {
	h.Set("Content-Security-Policy", securityPolicy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("X-Frame-Options", "DENY")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
}
