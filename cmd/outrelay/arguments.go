package main

import (
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/outrelay/outrelay/internal/contract/config"
)

// noArgs rejects arguments. The argument of a group is a misspelled command.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	if cmd.HasSubCommands() {
		return unknownCommandError(cmd, args[0])
	}
	return argumentsError(cmd, fmt.Sprintf("takes no arguments, found %q", args[0]))
}

// exactArgs accepts exactly n arguments.
func exactArgs(n int) cobra.PositionalArgs { return countArgs(n, n, "needs", n) }

// minArgs accepts n or more arguments.
func minArgs(n int) cobra.PositionalArgs { return countArgs(n, math.MaxInt, "needs at least", n) }

// maxArgs accepts at most n arguments.
func maxArgs(n int) cobra.PositionalArgs { return countArgs(0, n, "takes at most", n) }

// countArgs accepts between least and most arguments. rule and n describe that in the error.
func countArgs(least, most int, rule string, n int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) >= least && len(args) <= most {
			return nil
		}
		return argumentsError(cmd, fmt.Sprintf("%s %s, found %d", rule, countNoun(int64(n), "argument"), len(args)))
	}
}

// nameOrOff accepts the name of a noun, or none with the flag --off.
func nameOrOff(noun string, off *bool) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if *off != (len(args) == 0) {
			return argumentsError(cmd, "needs either the name of a "+noun+" or --off")
		}
		return nil
	}
}

// argumentsError returns an error with the usage of the command.
func argumentsError(cmd *cobra.Command, problem string) error {
	if err := checkFlagValues(cmd); err != nil {
		return err
	}
	return fmt.Errorf("%s %s; usage: %s", cmd.CommandPath(), problem, strings.TrimSuffix(cmd.UseLine(), " [flags]"))
}

// unknownCommandError returns an error with the commands that name may stand for.
func unknownCommandError(cmd *cobra.Command, name string) error {
	names := make([]string, 0, len(cmd.Commands()))
	for _, sub := range cmd.Commands() {
		if sub.IsAvailableCommand() {
			names = append(names, sub.Name())
		}
	}

	next := fmt.Sprintf("run `%s --help` for the list", cmd.CommandPath())
	if successor := formerCommands[cmd.CommandPath()+" "+name]; successor != "" {
		next = fmt.Sprintf("`%s` replaces it", successor)
	} else if near := config.NearestName(name, names); near != "" {
		next = fmt.Sprintf("did you mean `%s %s`?", cmd.CommandPath(), near)
	}
	return fmt.Errorf("unknown command %q of %s; %s", name, cmd.CommandPath(), next)
}

// explainFlagError states the problem of a flag, and the flag that was probably meant.
func explainFlagError(cmd *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	if errors.As(err, &unknown) {
		return unknownFlagError(cmd, unknown)
	}

	var value *pflag.InvalidValueError
	if errors.As(err, &value) {
		flag := value.GetFlag()
		switch flag.Value.(type) {
		case limitValue, timeValue:
			// Their errors state the accepted values.
			return fmt.Errorf("--%s: found %q; %w", flag.Name, value.GetValue(), value.Unwrap())
		}
		return fmt.Errorf("--%s: found %q; expected %s", flag.Name, value.GetValue(), describeFlagValue(flag.Value))
	}
	var missing *pflag.ValueRequiredError
	if errors.As(err, &missing) {
		kind, _ := pflag.UnquoteUsage(missing.GetFlag())
		return fmt.Errorf("--%s needs a value: --%s <%s>", missing.GetFlag().Name, missing.GetFlag().Name, kind)
	}
	return fmt.Errorf("%w; run `%s --help`", err, cmd.CommandPath())
}

func unknownFlagError(cmd *cobra.Command, unknown *pflag.NotExistError) error {
	if letters := unknown.GetSpecifiedShortnames(); letters != "" {
		next := fmt.Sprintf("run `%s --help` for the flags", cmd.CommandPath())
		if strings.Contains(cmd.Use, "ID") {
			next += ", or put -- before an id that begins with -"
		}
		return fmt.Errorf("unknown flag -%s; %s", unknown.GetSpecifiedName(), next)
	}

	var names []string
	cmd.Flags().VisitAll(func(flag *pflag.Flag) {
		if !flag.Hidden {
			names = append(names, flag.Name)
		}
	})
	next := fmt.Sprintf("run `%s --help` for the flags", cmd.CommandPath())
	if successor := findSuccessorOfFlag(cmd, unknown.GetSpecifiedName()); successor != "" {
		next = successor + " replaces it"
	} else if near := config.NearestName(unknown.GetSpecifiedName(), names); near != "" {
		next = "did you mean --" + near + "?"
	}
	return fmt.Errorf("unknown flag --%s; %s", unknown.GetSpecifiedName(), next)
}

// The annotations in which cobra keeps the groups of flags. Each value is the names of a group, with blanks in between.
const (
	annotationExclusive   = "cobra_annotation_mutually_exclusive"
	annotationOneRequired = "cobra_annotation_one_required"
)

// checkFlagGroups returns an error that names the flags which exclude each other or are missing. It runs before the checks of
// cobra, whose errors list whole groups and no action.
func checkFlagGroups(cmd *cobra.Command) (err error) {
	if err := checkFlagValues(cmd); err != nil {
		return err
	}

	cmd.Flags().VisitAll(func(flag *pflag.Flag) {
		if err == nil && len(flag.Annotations[cobra.BashCompOneRequiredFlag]) > 0 && !flag.Changed {
			kind, _ := pflag.UnquoteUsage(flag)
			err = fmt.Errorf("%s needs --%s <%s>", cmd.CommandPath(), flag.Name, kind)
		}

		for _, group := range flag.Annotations[annotationExclusive] {
			if passed := passedFlags(cmd, group); err == nil && len(passed) > 1 {
				err = fmt.Errorf("%s and %s exclude each other; pass only one of them", passed[0], passed[1])
			}
		}

		for _, group := range flag.Annotations[annotationOneRequired] {
			if err == nil && len(passedFlags(cmd, group)) == 0 {
				err = fmt.Errorf("%s needs one of --%s", cmd.CommandPath(), strings.ReplaceAll(group, " ", ", --"))
			}
		}
	})
	return err
}

// checkFlagValues returns an error if a flag without its value has taken the flag after it as the value.
func checkFlagValues(cmd *cobra.Command) (err error) {
	cmd.Flags().Visit(func(flag *pflag.Flag) {
		value := strings.Trim(flag.Value.String(), "[]")
		if name, isFlag := strings.CutPrefix(value, "--"); isFlag && err == nil && cmd.Flags().Lookup(name) != nil {
			err = fmt.Errorf("--%s needs a value, found the flag %s", flag.Name, value)
		}
	})
	return err
}

// passedFlags returns the flags of a group that the command line has, with their dashes.
func passedFlags(cmd *cobra.Command, group string) (passed []string) {
	for _, name := range strings.Fields(group) {
		if cmd.Flags().Changed(name) {
			passed = append(passed, "--"+name)
		}
	}
	return passed
}

// describeFlagValue returns the values that a flag accepts.
func describeFlagValue(value pflag.Value) string {
	switch value.Type() {
	case "int", "int32", "int64", "intSlice":
		return "a whole number"
	case "bool":
		return "true or false"
	case "duration":
		return "a duration such as 30s or 2h"
	}
	return "a value of type " + value.Type()
}
