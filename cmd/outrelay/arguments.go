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
func noArgs(c *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	if c.HasSubCommands() {
		return unknownCommandError(c, args[0])
	}
	return argumentsError(c, fmt.Sprintf("takes no arguments, found %q", args[0]))
}

// exactArgs accepts exactly n arguments.
func exactArgs(n int) cobra.PositionalArgs { return countArgs(n, n, "needs", n) }

// minArgs accepts n or more arguments.
func minArgs(n int) cobra.PositionalArgs { return countArgs(n, math.MaxInt, "needs at least", n) }

// maxArgs accepts at most n arguments.
func maxArgs(n int) cobra.PositionalArgs { return countArgs(0, n, "takes at most", n) }

// countArgs accepts between least and most arguments. rule and n describe that in the error.
func countArgs(least, most int, rule string, n int) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) >= least && len(args) <= most {
			return nil
		}
		return argumentsError(c, fmt.Sprintf("%s %s, found %d", rule, countNoun(int64(n), "argument"), len(args)))
	}
}

// nameOrOff accepts the name of a noun, or none with the flag --off.
func nameOrOff(noun string, off *bool) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if *off != (len(args) == 0) {
			return argumentsError(c, "needs either the name of a "+noun+" or --off")
		}
		return nil
	}
}

// argumentsError returns an error with the usage of the command.
func argumentsError(c *cobra.Command, problem string) error {
	if err := checkFlagValues(c); err != nil {
		return err
	}
	return fmt.Errorf("%s %s; usage: %s", c.CommandPath(), problem, strings.TrimSuffix(c.UseLine(), " [flags]"))
}

// unknownCommandError returns an error with the commands that name may stand for.
func unknownCommandError(c *cobra.Command, name string) error {
	names := make([]string, 0, len(c.Commands()))
	for _, sub := range c.Commands() {
		if sub.IsAvailableCommand() {
			names = append(names, sub.Name())
		}
	}

	next := fmt.Sprintf("run `%s --help` for the list", c.CommandPath())
	if near := config.NearestName(name, names); near != "" {
		next = fmt.Sprintf("did you mean `%s %s`?", c.CommandPath(), near)
	}
	return fmt.Errorf("unknown command %q of %s; %s", name, c.CommandPath(), next)
}

// explainFlagError states the problem of a flag, and the flag that was probably meant.
func explainFlagError(c *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	if errors.As(err, &unknown) {
		return unknownFlagError(c, unknown)
	}

	var value *pflag.InvalidValueError
	if errors.As(err, &value) {
		f := value.GetFlag()
		switch f.Value.(type) {
		case limitValue, timeValue:
			// Their errors state the accepted values.
			return fmt.Errorf("--%s: found %q; %w", f.Name, value.GetValue(), value.Unwrap())
		}
		return fmt.Errorf("--%s: found %q; expected %s", f.Name, value.GetValue(), describeFlagValue(f.Value))
	}
	var missing *pflag.ValueRequiredError
	if errors.As(err, &missing) {
		kind, _ := pflag.UnquoteUsage(missing.GetFlag())
		return fmt.Errorf("--%s needs a value: --%s <%s>", missing.GetFlag().Name, missing.GetFlag().Name, kind)
	}
	return fmt.Errorf("%w; run `%s --help`", err, c.CommandPath())
}

func unknownFlagError(c *cobra.Command, unknown *pflag.NotExistError) error {
	if letters := unknown.GetSpecifiedShortnames(); letters != "" {
		next := fmt.Sprintf("run `%s --help` for the flags", c.CommandPath())
		if strings.Contains(c.Use, "ID") {
			next += ", or put -- before an id that begins with -"
		}
		return fmt.Errorf("unknown flag -%s; %s", unknown.GetSpecifiedName(), next)
	}

	var names []string
	c.Flags().VisitAll(func(f *pflag.Flag) {
		if !f.Hidden {
			names = append(names, f.Name)
		}
	})
	next := fmt.Sprintf("run `%s --help` for the flags", c.CommandPath())
	if near := config.NearestName(unknown.GetSpecifiedName(), names); near != "" {
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
func checkFlagGroups(c *cobra.Command) (err error) {
	if err := checkFlagValues(c); err != nil {
		return err
	}

	c.Flags().VisitAll(func(f *pflag.Flag) {
		if err == nil && len(f.Annotations[cobra.BashCompOneRequiredFlag]) > 0 && !f.Changed {
			kind, _ := pflag.UnquoteUsage(f)
			err = fmt.Errorf("%s needs --%s <%s>", c.CommandPath(), f.Name, kind)
		}

		for _, group := range f.Annotations[annotationExclusive] {
			if passed := passedFlags(c, group); err == nil && len(passed) > 1 {
				err = fmt.Errorf("%s and %s exclude each other; pass only one of them", passed[0], passed[1])
			}
		}

		for _, group := range f.Annotations[annotationOneRequired] {
			if err == nil && len(passedFlags(c, group)) == 0 {
				err = fmt.Errorf("%s needs one of --%s", c.CommandPath(), strings.ReplaceAll(group, " ", ", --"))
			}
		}
	})
	return err
}

// checkFlagValues returns an error if a flag without its value has taken the flag after it as the value.
func checkFlagValues(c *cobra.Command) (err error) {
	c.Flags().Visit(func(f *pflag.Flag) {
		value := strings.Trim(f.Value.String(), "[]")
		if name, isFlag := strings.CutPrefix(value, "--"); isFlag && err == nil && c.Flags().Lookup(name) != nil {
			err = fmt.Errorf("--%s needs a value, found the flag %s", f.Name, value)
		}
	})
	return err
}

// passedFlags returns the flags of a group that the command line has, with their dashes.
func passedFlags(c *cobra.Command, group string) (passed []string) {
	for _, name := range strings.Fields(group) {
		if c.Flags().Changed(name) {
			passed = append(passed, "--"+name)
		}
	}
	return passed
}

// describeFlagValue returns the values that a flag accepts.
func describeFlagValue(v pflag.Value) string {
	switch v.Type() {
	case "int", "int32", "int64", "intSlice":
		return "a whole number"
	case "bool":
		return "true or false"
	case "duration":
		return "a duration such as 30s or 2h"
	}
	return "a value of type " + v.Type()
}
