package apiserver

import (
	"strings"
	"testing"
	"time"

	"github.com/stratakube/strata/kube/kubestorage"
)

func TestTokenSettings_InvalidFlag_IsRejected(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*tokenSettings)
		seal   bool
		wrong  string
	}{
		"defaults":                      {change: func(*tokenSettings) {}},
		"defaults, sealing":             {change: func(*tokenSettings) {}, seal: true},
		"never rotated":                 {change: func(s *tokenSettings) { s.keyRotation = 0 }},
		"rotated each minute":           {change: func(s *tokenSettings) { s.keyRotation = time.Minute }},
		"rotated too often":             {change: func(s *tokenSettings) { s.keyRotation = time.Second }, wrong: "--strata-continue-token-key-rotation"},
		"negative":                      {change: func(s *tokenSettings) { s.keyRotation = -time.Hour }, wrong: "--strata-continue-token-key-rotation"},
		"plain refused":                 {change: func(s *tokenSettings) { s.refusePlain = true }, seal: true},
		"plain refused without sealing": {change: func(s *tokenSettings) { s.refusePlain = true }, wrong: "--strata-refuse-plain-continue-tokens"},
	} {
		gates, settings := newGates(), defaultTokenSettings()
		if test.seal {
			if err := gates.Set(string(kubestorage.SealedContinueTokens) + "=true"); err != nil {
				t.Fatal(err)
			}
		}
		test.change(&settings)
		err := settings.validate(gates)
		if (err == nil) != (test.wrong == "") || (err != nil && !strings.Contains(err.Error(), test.wrong)) {
			t.Errorf("%s: got %v, want %q", name, err, test.wrong)
		}
	}
}
