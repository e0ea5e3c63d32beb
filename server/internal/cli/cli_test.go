package cli_test

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	cliflag "k8s.io/component-base/cli/flag"

	"github.com/stratakube/strata/server/internal/cli"
)

// program is a command with a sub-command, like strata; run is the latter's action.
func program(run func() error) *cobra.Command {
	root := &cobra.Command{Use: "program"}
	child := &cobra.Command{
		Use:     "child",
		Short:   "Do the work",
		Long:    "Do the work.\n\nThe details.",
		Example: "  {program} child --size 3",
		Args:    cobra.NoArgs,
		RunE:    func(*cobra.Command, []string) error { return run() },
	}
	fs := child.Flags()
	fs.Int("size", 0, "size")
	fs.Duration("every", 5*time.Minute, "interval")
	fs.IP("address", net.IPv4(127, 0, 0, 1), "address")
	fs.Bool("fast", false, "fast")
	fs.Float64("factor", 1, "factor")
	fs.Var(cliflag.NewMapStringBool(new(map[string]bool)), "gates", "gates")
	child.MarkFlagsMutuallyExclusive("size", "factor")
	needs := &cobra.Command{Use: "needs", RunE: child.RunE}
	needs.Flags().String("file", "", "file")
	_ = needs.MarkFlagRequired("file")
	root.AddCommand(child, needs)
	return root
}

// call runs the program with arguments.
func call(args []string, run func() error) (stderr string, code int) {
	root := program(run)
	root.SetArgs(args)
	root.SetOut(&bytes.Buffer{})
	root.SetErr(&bytes.Buffer{})
	var out bytes.Buffer
	code = cli.Main(root, &out)
	return out.String(), code
}

func TestMain_Errors_HaveCodesAndOneLine(t *testing.T) {
	failure := func() error { return fmt.Errorf("read a file:\n\tdisk broken") }
	misuse := func() error { return fmt.Errorf("child: %w", cli.Misusef("--size 0 is too small")) }
	for name, test := range map[string]struct {
		args string
		run  func() error
		code int
		want string
	}{
		"success":           {"child", func() error { return nil }, 0, ""},
		"failure":           {"child", failure, cli.Failed, "program: read a file: disk broken\n"},
		"misuse while run":  {"child", misuse, cli.Misused, "program: child: --size 0 is too small (see program child --help)\n"},
		"unknown command":   {"other", failure, cli.Misused, "program: unknown command \"other\" for \"program\" (see program --help)\n"},
		"unknown flag":      {"child --bogus", failure, cli.Misused, "program: unknown flag: --bogus (see program child --help)\n"},
		"argument":          {"child more", failure, cli.Misused, "program: unknown command \"more\" for \"program child\" (see program child --help)\n"},
		"not a number":      {"child --size=x", failure, cli.Misused, "program: --size \"x\": must be a whole number in the range of int (see program child --help)\n"},
		"not a duration":    {"child --every=5", failure, cli.Misused, "program: --every \"5\": must be a duration such as 90s or 1h30m (see program child --help)\n"},
		"not an address":    {"child --address=x", failure, cli.Misused, "program: --address \"x\": must be an IP address such as 127.0.0.1 (see program child --help)\n"},
		"not a truth value": {"child --fast=x", failure, cli.Misused, "program: --fast \"x\": must be true or false (see program child --help)\n"},
		"required flag":     {"needs", failure, cli.Misused, "program: --file is required (see program needs --help)\n"},
		"exclusive flags":   {"child --size=1 --factor=1", failure, cli.Misused, "program: --size and --factor exclude each other: set one of them (see program child --help)\n"},
		"not a gate":        {"child --gates=A=x", failure, cli.Misused, "program: --gates \"A=x\": invalid value of A: x: must be true or false (see program child --help)\n"},
		"not a float":       {"child --factor=x", failure, cli.Misused, "program: --factor \"x\": must be a number (see program child --help)\n"},
	} {
		t.Run(name, func(t *testing.T) {
			stderr, code := call(strings.Fields(test.args), test.run)
			if stderr != test.want || code != test.code {
				t.Errorf("code %d, standard error %q; want %d, %q", code, stderr, test.code, test.want)
			}
		})
	}
}

// valued is a flag's value whose errors are for users.
type valued struct{}

func (valued) String() string     { return "" }
func (valued) Type() string       { return "kind" }
func (valued) Set(s string) error { return fmt.Errorf("%q is no kind: give a or b", s) }

func TestFlagError_ErrorWithTheValue_DoesNotRepeatIt(t *testing.T) {
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	fs.Var(valued{}, "kind", "")
	err := cli.FlagError(fs.Parse([]string{"--kind=c"}))
	if got, want := err.Error(), `--kind: "c" is no kind: give a or b`; got != want || !cli.IsMisuse(err) {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestMisuse_NoErrorAndOtherError_AreNone(t *testing.T) {
	if err := cli.Misuse(nil); err != nil {
		t.Errorf("misuse of nil: %v", err)
	}
	if cli.IsMisuse(os.ErrNotExist) || !errors.Is(cli.Misuse(os.ErrNotExist), os.ErrNotExist) {
		t.Error("an error of another kind is misuse, or misuse hides its cause")
	}
	if got := cli.WithHelp(os.ErrNotExist, "program"); got != os.ErrNotExist {
		t.Errorf("help for an error that is no misuse: %v", got)
	}
}

func TestHelp_OwnFlagsAndExamples_ComeFirst(t *testing.T) {
	root := program(nil)
	child := root.Commands()[0]
	var upstream cliflag.NamedFlagSets
	upstream.FlagSet("logs").Int("verbosity", 2, "how much is logged")
	child.Flags().AddFlagSet(upstream.FlagSets["logs"])
	cli.ShortenDurations(child.Flags())
	cli.SetDefault(child.Flags(), "size", "as large as the machine")
	cli.SetHelp(root, cliflag.NamedFlagSets{})
	cli.SetHelp(child, upstream)
	var out bytes.Buffer
	root.SetOut(&out)
	root.SetArgs([]string{"child", "--help"})
	if err := root.Execute(); err != nil {
		t.Fatal(err)
	}
	const want = `Do the work.

Usage:
  program child [flags]

Examples:
  program child --size 3

The details.

Strata flags:

      --address ip            address (default 127.0.0.1)
      --every duration        interval (default 5m)
      --factor float          factor (default 1)
      --fast                  fast
      --gates mapStringBool   gates
  -h, --help                  help for child
      --size int              size (default as large as the machine)

Logs flags:

      --verbosity int   how much is logged (default 2)
`
	if got := out.String(); got != want {
		t.Errorf("help is\n%s\nwant\n%s", got, want)
	}
}
