package main

import (
	"fmt"
	"strconv"

	"github.com/spf13/cobra"
)

// limitValue is the value of a flag --limit: a whole number from 1 to most.
type limitValue struct {
	n    *int
	most int
}

// addLimitFlag adds the flag --limit, whose range the usage states.
func addLimitFlag(cmd *cobra.Command, n *int, usual, most int, usage string) {
	*n = usual
	cmd.Flags().Var(limitValue{n, most}, "limit", fmt.Sprintf("%s, at most %d", usage, most))
}

func (v limitValue) String() string {
	// The library calls it for the zero value too.
	if v.n == nil {
		return ""
	}
	return strconv.Itoa(*v.n)
}

func (v limitValue) Set(text string) error {
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > v.most {
		return fmt.Errorf("expected a whole number from 1 to %d", v.most)
	}
	*v.n = n
	return nil
}

func (v limitValue) Type() string { return "int" }
