package console

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"mime"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/klog/v2"
)

const (
	// linkLife is the time in which a link can be used: the user has it on the terminal in front of
	// the browser. A guess.
	linkLife = 10 * time.Minute
	// sessionLife is a working day. The page asks for another link after it.
	sessionLife = 12 * time.Hour
	// maxTokens bounds the unused links and, separately, the sessions; the oldest is dropped.
	maxTokens = 16

	// refusalLogs and refusalInterval bound the log entries of refused sessions, whose requests
	// need no credentials: a user sees the first ones, and then whether there are more. A guess.
	refusalLogs     = 10
	refusalInterval = time.Minute

	// sessionPrefix distinguishes the tokens of sessions from those of other authenticators.
	sessionPrefix = "strata-console-"
	// UserName is the user of every session, in audit logs for example. Authorization of sessions
	// does not depend on it.
	UserName = "strata:console"

	sessionPath = Path + "/session"
	linkPath    = Path + "/link"
)

// Sessions lets a browser on this machine read, without a certificate or token of its own.
//
//	NewLink ─▶ https://127.0.0.1:6443/debug/strata/console/#token=T ─▶ the page ── POST session, T ──▶ S ─▶ requests with Bearer S
//
// T is valid once and for ten minutes. It is in the fragment of the link, which a browser does not
// send, so no log of a server or proxy has it. S is valid for twelve hours, and until the server
// stops. The page has S in the session storage of its tab, whose scope is scheme, host and port. It
// is no cookie, because a cookie of a host is sent to all ports: to servers of other users of the
// machine too, if the browser opens their pages. Without a cookie, a page of another origin cannot
// act for the session either.
//
// T and S have 256 random bits, and are stored and compared by their SHA-256 only. Both are
// accepted in local requests only. The requests of a session are bounded by readOnly. Methods are
// safe for concurrent use.
type Sessions struct {
	mu       sync.Mutex // leaf
	links    tokens
	sessions tokens

	refused    atomic.Int64 // sessions since the start
	logRefusal rate.Sometimes
}

// tokens are hashes of tokens in the order in which they were made, with the end of their validity.
type tokens []struct {
	hash [sha256.Size]byte
	ends time.Time
}

// NewSessions returns sessions without links.
func NewSessions() *Sessions {
	return &Sessions{logRefusal: rate.Sometimes{First: refusalLogs, Interval: refusalInterval}}
}

// add makes a token with a prefix.
func (t *tokens) add(prefix string, life time.Duration) (token string, ends time.Time) {
	var random [32]byte
	_, _ = rand.Read(random[:]) // never fails
	token = prefix + base64.RawURLEncoding.EncodeToString(random[:])
	ends = time.Now().Add(life)
	t.expire()
	*t = append(*t, (tokens{{hash: sha256.Sum256([]byte(token)), ends: ends}})...)
	if len(*t) > maxTokens {
		*t = slices.Delete(*t, 0, len(*t)-maxTokens)
	}
	return token, ends
}

func (t *tokens) expire() {
	kept := (*t)[:0]
	for _, x := range *t {
		if time.Now().Before(x.ends) {
			kept = append(kept, x)
		}
	}
	clear((*t)[len(kept):])
	*t = kept
}

// find returns the index of a valid token, or -1. Its time depends on hashes only, which say
// nothing about tokens.
func (t *tokens) find(token string) int {
	t.expire()
	hash := sha256.Sum256([]byte(token))
	for i := range *t {
		if (*t)[i].hash == hash {
			return i
		}
	}
	return -1
}

// NewLink returns the path and fragment of a link that opens the page once, and the end of its
// validity.
func (s *Sessions) NewLink() (link string, ends time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	token, ends := s.links.add("", linkLife)
	return Path + "/#token=" + token, ends
}

// begin exchanges the token of a link for that of a session.
func (s *Sessions) begin(link string) (session string, ends time.Time, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := s.links.find(link)
	if i < 0 {
		return "", time.Time{}, false
	}
	s.links = slices.Delete(s.links, i, i+1)
	session, ends = s.sessions.add(sessionPrefix, sessionLife)
	return session, ends, true
}

// end ends a session. It reports false if there is none.
func (s *Sessions) end(session string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := s.sessions.find(session)
	if i >= 0 {
		s.sessions = slices.Delete(s.sessions, i, i+1)
	}
	return i >= 0
}

func (s *Sessions) valid(session string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sessions.find(session) >= 0
}

// local reports whether a request came from this machine, and names a loopback address or localhost
// as its server. A page of another site, whose name resolves to 127.0.0.1, sends that name.
func local(r *http.Request) bool {
	from, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil || !net.ParseIP(from).IsLoopback() {
		return false
	}
	to, _, err := net.SplitHostPort(r.Host)
	if err != nil { // without a port
		to = strings.Trim(r.Host, "[]")
	}
	return to == "localhost" || net.ParseIP(to).IsLoopback()
}

// notLocal is the answer to requests for links and sessions that are not local.
const notLocal = "the console has links and sessions for browsers on the server's own machine only, at a loopback address (127.0.0.1, ::1, localhost): " +
	"use the kubeconfig of strata up there, or run strata kubectl proxy here and open " + Path + "/ at its address"

// bearer returns the session token of a request, "" if it has none.
func bearer(r *http.Request) string {
	token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !ok || !strings.HasPrefix(token, sessionPrefix) {
		return ""
	}
	return token
}

// sessionUser is the user of a session. readOnly recognizes sessions by this type, which no other
// authenticator and no impersonation makes.
type sessionUser struct{ user.Info }

// AuthenticateRequest implements authenticator.Request: requests with the token of a session, from
// this machine.
func (s *Sessions) AuthenticateRequest(r *http.Request) (*authenticator.Response, bool, error) {
	token := bearer(r)
	if token == "" || !local(r) || !s.valid(token) {
		return nil, false, nil
	}
	// as upstream's authenticators do: handlers, and servers behind this one, need no token
	r.Header.Del("Authorization")
	return &authenticator.Response{User: &sessionUser{&user.DefaultInfo{Name: UserName, Groups: []string{user.AllAuthenticated}}}}, true, nil
}

// Outermost returns a handler in front of a server's authentication. To clients on this machine it
// serves the files of the page, and exchanges tokens; other requests, except for those for
// sessions, go to next.
func (s *Sessions) Outermost(next http.Handler) http.Handler {
	page := Handler()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		below := r.URL.Path == Path || strings.HasPrefix(r.URL.Path, Path+"/")
		switch {
		case r.URL.Path == sessionPath:
			s.serveSession(w, r)
		case !below || r.URL.Path == linkPath || !local(r):
			next.ServeHTTP(w, r)
		default:
			page.ServeHTTP(w, r)
		}
	})
}

// serveSession begins a session (POST) or ends it (DELETE).
func (s *Sessions) serveSession(w http.ResponseWriter, r *http.Request) {
	setHeaders(w.Header())
	w.Header().Set("Cache-Control", "no-store")
	if !local(r) {
		http.Error(w, notLocal, http.StatusForbidden)
		return
	}
	switch r.Method {
	case http.MethodPost:
		media, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
		if site := r.Header.Get("Sec-Fetch-Site"); err != nil || media != "application/json" || site != "" && site != "same-origin" {
			http.Error(w, "a session begins with a JSON object from the page of the console itself", http.StatusForbidden)
			return
		}
		var request struct {
			Token string `json:"token"`
		}
		if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<10)).Decode(&request); err != nil {
			http.Error(w, "the request is no JSON object with a token", http.StatusBadRequest)
			return
		}
		token, ends, ok := s.begin(request.Token)
		if !ok {
			refused := s.refused.Add(1)
			s.logRefusal.Do(func() {
				klog.InfoS("Refused a session of the console: its link was used, has expired, or does not exist", "remote", r.RemoteAddr, "refusals", refused)
			})
			http.Error(w, "the link was used before, or is older than ten minutes; `strata console` prints another one", http.StatusForbidden)
			return
		}
		klog.InfoS("Began a session of the console", "remote", r.RemoteAddr, "ends", ends)
		writeJSON(w, map[string]any{"token": token, "ends": ends})
	case http.MethodDelete:
		if !s.end(bearer(r)) {
			http.Error(w, "the session does not exist, or has ended", http.StatusForbidden)
			return
		}
		klog.InfoS("Ended a session of the console", "remote", r.RemoteAddr)
		w.WriteHeader(http.StatusNoContent)
	default:
		w.Header().Set("Allow", "DELETE, POST")
		http.Error(w, "method not allowed: use POST or DELETE", http.StatusMethodNotAllowed)
	}
}

// LinkHandler answers POST with a link. It does not authorize requests: mount it behind filters
// that do, at LinkPath.
func (s *Sessions) LinkHandler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		setHeaders(w.Header())
		w.Header().Set("Cache-Control", "no-store")
		if r.Method != http.MethodPost {
			w.Header().Set("Allow", "POST")
			http.Error(w, "method not allowed: use POST", http.StatusMethodNotAllowed)
			return
		}
		if !local(r) {
			http.Error(w, notLocal, http.StatusForbidden)
			return
		}
		link, ends := s.NewLink()
		writeJSON(w, Link{Path: link, Ends: ends})
	})
}

// LinkPath is where servers mount LinkHandler.
const LinkPath = linkPath

// Link is the answer of LinkHandler.
type Link struct {
	Path string    `json:"path"` // with the fragment
	Ends time.Time `json:"ends"`
}

func writeJSON(w http.ResponseWriter, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(append(body, '\n')) // an error is that of the client
}

var _ authenticator.Request = (*Sessions)(nil)
