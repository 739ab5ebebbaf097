package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// listing is the output of a command that shows a list, or a page of a longer list.
type listing[T any] struct {
	name  string // of a whole list in JSON; "" for pages
	noun  string // of an item of a page, in the singular; "" for whole lists
	empty string // the text for an empty list
	head  string // of the table
	cells func(item T) cells
	// ofServices is set if the items are in databases of services: the text for an empty list names the databases.
	ofServices bool
}

// write writes the items as a table. Below a page, it writes the number of items, here and in all, and the cursor of the next page.
func (l listing[T]) write(out io.Writer, page admin.Page[T]) {
	if page.Total == 0 {
		fmt.Fprintln(out, l.empty)
		return
	}

	writeTable(out, l.head, page.Items, l.cells)
	if l.noun == "" {
		return
	}
	fmt.Fprintf(out, "%s of %s\n", formatThousands(int64(len(page.Items))), countNoun(page.Total, l.noun))
	if page.Next != "" {
		fmt.Fprintf(out, "next page: --after %s\n", page.Next)
	}
}

// show prints the items: as JSON with --json, else as a table.
func (l listing[T]) show(ctx context.Context, action *operatorCommand, op admin.Operator, page admin.Page[T]) error {
	var value any = page
	if l.name != "" {
		value = map[string][]T{l.name: page.Items}
	}
	if page.Total == 0 && l.ofServices && !action.json {
		searched, err := describeSearched(ctx, op)
		if err != nil {
			return err
		}
		l.empty += searched
	}
	return action.printResult(value, func(out io.Writer) { l.write(out, page) })
}

// describeSearched returns the end of a sentence about something that no database of a service has.
func describeSearched(ctx context.Context, op admin.Operator) (string, error) {
	databases, err := op.ServiceDatabases(ctx, "")
	if err != nil {
		return "", err
	}
	return "; searched databases of services: " + admin.JoinSome(databases), nil
}

// showList reads a list and prints it: as JSON with --json, else as a table.
func showList[T any](
	ctx context.Context, action *operatorCommand, listing listing[T], read func(ctx context.Context, op admin.Operator) ([]T, error),
) error {
	return action.withOperator(ctx, func(ctx context.Context, op admin.Operator) error {
		list, err := read(ctx, op)
		if err != nil {
			return err
		}
		return listing.show(ctx, action, op, newWholePage(list))
	})
}

// setList makes cmd a command that reads a list and prints it.
func setList[T any](
	cmd *cobra.Command, action *operatorCommand, listing listing[T],
	read func(ctx context.Context, op admin.Operator, args []string) ([]T, error),
) {
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return showList(cmd.Context(), action, listing, func(ctx context.Context, op admin.Operator) ([]T, error) { return read(ctx, op, args) })
	}
}

// newListCommand completes cmd, which has no flags of its own, as a command that shows a list.
func newListCommand[T any](
	program *program, cmd *cobra.Command, listing listing[T], read func(ctx context.Context, op admin.Operator) ([]T, error),
) *cobra.Command {
	action := program.addReadFlags(cmd)
	cmd.Args = noArgs
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return showList(cmd.Context(), action, listing, read) }
	return cmd
}

// newWholePage returns a page with all items of a list.
func newWholePage[T any](list []T) admin.Page[T] {
	return admin.Page[T]{Items: list, Total: int64(len(list))}
}

// setPages makes cmd a command that reads a page of a list and prints it.
func setPages[T any](
	cmd *cobra.Command, action *operatorCommand, listing listing[T],
	read func(ctx context.Context, op admin.Operator, args []string) (admin.Page[T], error),
) {
	action.setRun(cmd, func(ctx context.Context, op admin.Operator, args []string) error {
		page, err := read(ctx, op, args)
		if err != nil {
			return err
		}
		return listing.show(ctx, action, op, page)
	})
}

// cells are the values of a row of a table.
type cells []any

// writeTable writes head and a row for each item in aligned columns. out must be a writer that cannot fail.
func writeTable[T any](out io.Writer, head string, list []T, cellsOf func(item T) cells) {
	table := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(table, head)

	for _, item := range list {
		var row []string
		for _, c := range cellsOf(item) {
			// A tab or line break in a value would start another cell or row.
			row = append(row, sanitizeLine(fmt.Sprint(c)))
		}
		fmt.Fprintln(table, strings.Join(row, "\t"))
	}
	// It returns only errors of out.
	_ = table.Flush()
}

// writeList is writeTable, or writes the text empty for an empty list.
func writeList[T any](out io.Writer, empty, head string, list []T, cellsOf func(item T) cells) {
	if len(list) == 0 {
		fmt.Fprintln(out, empty)
		return
	}
	writeTable(out, head, list, cellsOf)
}

// paging selects a page of a list.
type paging struct {
	limit int
	after string
}

// addPagingFlags adds the flags of a page. noun names the items of the list in the plural.
func addPagingFlags(cmd *cobra.Command, standard, most int, noun string) *paging {
	page := &paging{}
	addLimitFlag(cmd, &page.limit, standard, most, noun+" on a page")
	cmd.Flags().StringVar(&page.after, "after", "", "the `cursor` that the previous page ended with")
	return page
}
