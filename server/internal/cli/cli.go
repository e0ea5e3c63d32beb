// Package cli has the exit codes, the errors of flags, and the help that all commands of Strata
// share.
package cli

import (
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Exit codes. docs/reference.md lists them; those of `strata kubectl` are kubectl's.
const (
	Failed  = 1 // the command was understood, and failed
	Misused = 2 // the command line is wrong; nothing has been changed
)

// misuse is an error of the command line.
type misuse struct{ error }

func (m misuse) Unwrap() error { return m.error }

// Misuse marks err, unless it is nil, as an error of the command line.
func Misuse(err error) error {
	if err == nil || IsMisuse(err) {
		return err
	}
	return misuse{err}
}

// Misusef is Misuse of fmt.Errorf.
func Misusef(format string, args ...any) error { return Misuse(fmt.Errorf(format, args...)) }

// IsMisuse reports whether err is, or wraps, an error of the command line.
func IsMisuse(err error) bool {
	_, is := errors.AsType[misuse](err)
	return is
}

// WithHelp adds the help of a command as the next step to an error of the command line, unless the
// error names one.
func WithHelp(err error, command string) error {
	if !IsMisuse(err) || strings.Contains(err.Error(), "--help") {
		return err
	}
	return fmt.Errorf("%w (see %s --help)", err, command)
}

// Main runs a command with the arguments of the process, prints its error as one line, and returns
// the exit code.
func Main(root *cobra.Command, stderr io.Writer) (code int) {
	root.SilenceUsage, root.SilenceErrors = true, true
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return FlagError(err) })
	started := false
	var wrap func(*cobra.Command)
	wrap = func(cmd *cobra.Command) {
		if run := cmd.RunE; run != nil {
			cmd.RunE = func(cmd *cobra.Command, args []string) error {
				started = true
				return run(cmd, args)
			}
		}
		for _, child := range cmd.Commands() {
			wrap(child)
		}
	}
	wrap(root)
	cmd, err := root.ExecuteC()
	if err == nil {
		return 0
	}
	code = Failed
	if !started {
		err = Misuse(plainer(err))
	}
	if IsMisuse(err) {
		code, err = Misused, WithHelp(err, cmd.CommandPath())
	}
	fmt.Fprintf(stderr, "%s: %s\n", root.CommandPath(), OneLine(err))
	return code
}

// Errors of cobra about several flags, in its words.
var (
	exclusiveFlags = regexp.MustCompile(`^if any flags in the group \[(.*)\] are set none of the others can be; \[.*\] were all set$`)
	requiredFlags  = regexp.MustCompile(`^required flag\(s\) "(.*)" not set$`)
	notBool        = regexp.MustCompile(`(, err)?: strconv\.ParseBool: parsing ".*": invalid syntax$`)
)

// plainer returns an error of cobra in words for the user.
func plainer(err error) error {
	if m := exclusiveFlags.FindStringSubmatch(err.Error()); m != nil {
		return fmt.Errorf("--%s exclude each other: set one of them", strings.Join(strings.Fields(m[1]), " and --"))
	}
	if m := requiredFlags.FindStringSubmatch(err.Error()); m != nil {
		verb := "is"
		if strings.Contains(m[1], `", "`) {
			verb = "are"
		}
		return fmt.Errorf("--%s %s required", strings.ReplaceAll(m[1], `", "`, " and --"), verb)
	}
	return err
}

// OneLine returns the message of err with each sequence of white space replaced by one space.
func OneLine(err error) string { return strings.Join(strings.Fields(err.Error()), " ") }

// FlagError returns the error of a flag for the user: the flag, its value, and the values that it
// takes, in place of the names of functions that have parsed it.
func FlagError(err error) error {
	invalid, is := errors.AsType[*pflag.InvalidValueError](err)
	if !is {
		return Misuse(err)
	}
	flag, value := invalid.GetFlag(), invalid.GetValue()
	text := expected(flag.Value.Type(), invalid.Unwrap())
	if strings.Contains(text, value) && value != "" {
		return Misusef("--%s: %s", flag.Name, text)
	}
	return Misusef("--%s %q: %s", flag.Name, value, text)
}

// expected returns the description of the values of a type; of types with errors for users, the
// error.
func expected(kind string, err error) string {
	_, number := errors.AsType[*strconv.NumError](err)
	switch {
	case kind == "duration":
		return "must be a duration such as 90s or 1h30m"
	case kind == "quantity":
		return "must be a size such as 256Mi or 1Gi"
	case kind == "ip":
		return "must be an IP address such as 127.0.0.1"
	case number && kind == "bool":
		return "must be true or false"
	case number && strings.HasPrefix(kind, "float"):
		return "must be a number"
	case number:
		return "must be a whole number in the range of " + kind
	}
	return notBool.ReplaceAllString(err.Error(), ": must be true or false")
}
