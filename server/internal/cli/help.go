package cli

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	cliflag "k8s.io/component-base/cli/flag"
	"k8s.io/component-base/term"
)

// Program in the text of cobra.Command.Example stands for the command that the example is a
// sub-command of, as the user has called it: "strata history" or "kubectl strata".
const Program = "{program}"

// ownSection is the section of Strata's own flags.
const ownSection = "strata"

// SetHelp sets the help and the usage of a command, and of its sub-commands that have none: what it
// does, usage, examples, details, sub-commands, and the flags. The flags of upstream, which
// libraries of Kubernetes define, have sections of their own after those of Strata, which are all
// others.
func SetHelp(cmd *cobra.Command, upstream cliflag.NamedFlagSets) {
	cmd.SetHelpFunc(func(cmd *cobra.Command, _ []string) { printHelp(cmd.OutOrStdout(), cmd, upstream) })
	cmd.SetUsageFunc(func(cmd *cobra.Command) error {
		printUsage(cmd.OutOrStderr(), cmd)
		return nil
	})
}

func printHelp(out io.Writer, cmd *cobra.Command, upstream cliflag.NamedFlagSets) {
	cmd.InitDefaultHelpFlag() // unless cobra has done it
	description := strings.TrimSpace(cmd.Long)
	if description == "" {
		description = cmd.Short + "."
	}
	first, details, _ := strings.Cut(description, "\n\n")
	fmt.Fprintln(out, first)
	printUsage(out, cmd)
	if cmd.Example != "" {
		program := cmd.CommandPath()
		if !cmd.HasAvailableSubCommands() && cmd.HasParent() {
			program = cmd.Parent().CommandPath()
		}
		fmt.Fprintf(out, "\nExamples:\n%s\n", strings.ReplaceAll(cmd.Example, Program, program))
	}
	if details != "" {
		fmt.Fprintf(out, "\n%s\n", details)
	}
	if cmd.HasAvailableSubCommands() {
		fmt.Fprint(out, "\nCommands:\n")
		for _, child := range cmd.Commands() {
			if child.IsAvailableCommand() || child.Name() == "help" {
				fmt.Fprintf(out, "  %-*s  %s\n", child.NamePadding(), child.Name(), child.Short)
			}
		}
		fmt.Fprintf(out, "\n%s COMMAND --help has the flags and examples of a command.\n", cmd.CommandPath())
	}
	columns, _, _ := term.TerminalSize(out) // 0 without a terminal: lines are not wrapped
	cliflag.PrintSections(out, sections(cmd, upstream), columns)
}

func printUsage(out io.Writer, cmd *cobra.Command) {
	fmt.Fprint(out, "\nUsage:\n")
	if cmd.Runnable() && !cmd.HasAvailableSubCommands() {
		fmt.Fprintf(out, "  %s\n", cmd.UseLine())
	}
	if cmd.HasAvailableSubCommands() {
		fmt.Fprintf(out, "  %s COMMAND [flags]\n", cmd.CommandPath())
	}
}

// sections returns Strata's flags, followed by those of upstream.
func sections(cmd *cobra.Command, upstream cliflag.NamedFlagSets) cliflag.NamedFlagSets {
	own := pflag.NewFlagSet(ownSection, pflag.ContinueOnError)
	// of component-base, which cobra adds to some commands
	version := pflag.CommandLine.Lookup("version")
	add := func(flag *pflag.Flag) {
		ofUpstream := slices.ContainsFunc(slices.Collect(maps.Values(upstream.FlagSets)), func(fs *pflag.FlagSet) bool { return fs.Lookup(flag.Name) != nil })
		if !flag.Hidden && !ofUpstream && (version == nil || flag.Value != version.Value) && own.Lookup(flag.Name) == nil {
			own.AddFlag(flag)
		}
	}
	cmd.LocalFlags().VisitAll(add)
	cmd.InheritedFlags().VisitAll(add)
	all := cliflag.NamedFlagSets{Order: append([]string{ownSection}, upstream.Order...), FlagSets: map[string]*pflag.FlagSet{ownSection: own}}
	maps.Copy(all.FlagSets, upstream.FlagSets)
	return all
}

// SetDefault sets the text that the help shows as the default of a flag, where the value does not
// tell it: because it depends on the machine, for example.
func SetDefault(flags *pflag.FlagSet, name, text string) { flags.Lookup(name).DefValue = text }

// ShortenDurations makes the help show 5m as the default of a flag in place of 5m0s.
func ShortenDurations(flags *pflag.FlagSet) {
	flags.VisitAll(func(flag *pflag.Flag) {
		if flag.Value.Type() == "duration" && len(flag.DefValue) > len("0s") {
			text := flag.DefValue
			for _, zero := range []string{"m0s", "h0m"} {
				if strings.HasSuffix(text, zero) {
					text = text[:len(text)-2]
				}
			}
			flag.DefValue = text
		}
	})
}
