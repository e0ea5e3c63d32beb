package target

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"

	"github.com/stratakube/strata/internal/process"
	"github.com/stratakube/strata/test/bench/internal/limit"
)

// LimitEngine is the value of EngineSpec.Engine for package limit.
const LimitEngine = "limit"

// IsLimit reports whether this is the limit and not an API server.
func (s EngineSpec) IsLimit() bool { return s.Engine == LimitEngine }

// startLimit runs this executable as the limit.
func startLimit(spec EngineSpec, port int, credentials *Credentials, logDir string) (*process.Child, error) {
	executable, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("start the limit: %w", err)
	}
	return process.Start(process.Spec{
		Name: spec.Label,
		Path: executable,
		Args: []string{
			limit.Command, "-address=" + fmt.Sprintf("127.0.0.1:%d", port), "-cert=" + credentials.certFile, "-key=" + credentials.keyFile,
		},
		Log: filepath.Join(logDir, spec.Label+".log"),
	})
}

// Imitate makes the limit drop its answers and replay those of origin from now on.
func (e *Engine) Imitate(ctx context.Context, origin *Engine) error {
	conn := e.Dial()
	defer conn.Close()
	return conn.Read(ctx, Request{Method: http.MethodPut, Path: limit.OriginPath, Body: []byte(origin.baseURL)}, new(bytes.Buffer))
}

// Misses is the number of requests that the limit forwarded so far.
func (e *Engine) Misses(ctx context.Context) (int, error) {
	conn := e.Dial()
	defer conn.Close()
	var body bytes.Buffer
	if err := conn.Read(ctx, Request{Path: limit.MissesPath}, &body); err != nil {
		return 0, err
	}
	return strconv.Atoi(body.String())
}

// FrameRequest is the request that makes the limit send a frame to all open watches.
func FrameRequest(frame []byte) Request {
	return Request{Method: http.MethodPost, Path: limit.FramePath, Body: frame}
}
