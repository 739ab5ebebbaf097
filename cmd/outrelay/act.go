package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/user"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/lab/adopt"
	"github.com/outrelay/outrelay/internal/lab/importing"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/operate/doctor"
	"github.com/outrelay/outrelay/internal/operate/operators"
	"github.com/outrelay/outrelay/internal/relay/connect"
)

// operatorCommand is the common part of the commands that read or change the collections of a watcher:
// their flags, the connection, the confirmation and the output.
type operatorCommand struct {
	p       *program
	json    bool
	dryRun  bool
	yes     bool
	actor   string
	changes bool          // the command may change something
	creates bool          // creates the state database
	slot    string        // act on the lease of this slot only; "" is all slots
	limit   time.Duration // bounds the reads of a command for which a person waits; 0 is no limit

	interactive bool // a person can answer a question
	onTerminal  bool // standard error is a terminal
}

// addReadFlags adds the flags of a command that changes nothing.
func (p *program) addReadFlags(c *cobra.Command) *operatorCommand {
	a := &operatorCommand{p: p, onTerminal: isTerminal(p.errOut), limit: statusTimeout}
	a.interactive = a.onTerminal && isTerminal(p.in)
	c.Flags().BoolVar(&a.json, "json", false, "print one JSON object on standard output")
	return a
}

// addChangeFlags adds the flags of a command that changes something.
func (p *program) addChangeFlags(c *cobra.Command) *operatorCommand {
	a := p.addReadFlags(c)
	// A change may work for hours, and waits for the answer of a person.
	a.changes, a.limit = true, 0
	c.Flags().BoolVar(&a.dryRun, "dry-run", false, "print the planned changes with counts, and change nothing")
	c.Flags().BoolVarP(&a.yes, "yes", "y", false, "skip the confirmation")
	a.addActorFlag(c)
	return a
}

func (a *operatorCommand) addActorFlag(c *cobra.Command) {
	c.Flags().StringVar(&a.actor, "actor", "", "`name` for the audit log; default: the name of the user")
}

// withOperator connects to the state database and calls f with the operator of the configured watcher.
// If a later attempt may succeed, the returned error exits with 75.
func (a *operatorCommand) withOperator(ctx context.Context, f func(ctx context.Context, op admin.Operator) error) error {
	cfg, _, err := a.p.loadWithLogger()
	if err != nil {
		return err
	}
	state, closeClient, err := connect.StateDatabase(cfg)
	if err != nil {
		return err
	}
	defer closeClient()

	op, err := operators.NewOperator(cfg, thisBuild().Version, state)
	if err != nil {
		return err
	}
	a.announceContext()

	// The cause of an error is searched for with ctx, which has time left after the limit.
	limited, cancel := ctx, context.CancelFunc(func() {})
	if a.limit > 0 {
		limited, cancel = context.WithTimeout(ctx, a.limit)
	}
	defer cancel()
	check := state.Check
	if a.changes && !a.creates && !a.dryRun {
		check = state.CheckReady
	}
	if err := check(limited); err != nil {
		return explainError(ctx, cfg, err)
	}
	err = f(limited, op.For(admin.Actor{Name: a.actorName(), Source: source}))
	return explainError(ctx, cfg, err)
}

// announceContext prints the context of a command that may change something.
func (a *operatorCommand) announceContext() {
	if a.changes && a.p.context != "" && !a.json {
		fmt.Fprintf(a.p.errOut, "context %s\n", sanitizeLine(a.p.context))
	}
}

// explainError is classifyError. If MongoDB did not answer, it connects once more to find the cause and the fix. A refused
// adoption or import stays permanent.
func explainError(ctx context.Context, cfg config.Config, err error) error {
	if errors.Is(err, adopt.ErrRefused) || errors.Is(err, importing.ErrRefused) {
		return err
	}
	if err == nil || ctx.Err() != nil || !admin.IsUnreachable(err) {
		return classifyError(err)
	}

	reason := doctor.ReachMongo(ctx, cfg)
	switch {
	case reason == nil:
		return classifyError(err)
	case doctor.ReasonOf(reason).Lasting:
		return reason
	}
	return markTemporary(reason)
}

// source is the source of an action in the audit log.
const source = "cli"

// setRun makes f the action of c. f gets the operator of the configured watcher and the arguments of the command.
func (a *operatorCommand) setRun(c *cobra.Command, f func(ctx context.Context, op admin.Operator, args []string) error) {
	c.RunE = func(c *cobra.Command, args []string) error {
		return a.withOperator(c.Context(), func(ctx context.Context, op admin.Operator) error { return f(ctx, op, args) })
	}
}

// setShow makes c a command that reads a value and prints it.
func setShow[T any](
	c *cobra.Command, a *operatorCommand,
	read func(ctx context.Context, op admin.Operator, args []string) (T, error), writeText func(w io.Writer, v T),
) {
	c.RunE = func(c *cobra.Command, args []string) error {
		return show(c.Context(), a, func(ctx context.Context, op admin.Operator) (T, error) { return read(ctx, op, args) }, writeText)
	}
}

// show reads a value and prints it: as JSON with --json, else by writeText.
func show[T any](
	ctx context.Context, a *operatorCommand,
	read func(ctx context.Context, op admin.Operator) (T, error), writeText func(w io.Writer, v T),
) error {
	return a.withOperator(ctx, func(ctx context.Context, op admin.Operator) error {
		v, err := read(ctx, op)
		if err != nil {
			return err
		}
		return a.printResult(v, func(w io.Writer) { writeText(w, v) })
	})
}

// listing is the output of a command that shows a list.
type listing[T any] struct {
	name  string // of the list in JSON
	empty string // the text for an empty list
	head  string // of the table
	cells func(item T) cells
}

// showList reads a list and prints it: as JSON with --json, else as a table.
func showList[T any](
	ctx context.Context, a *operatorCommand, l listing[T], read func(ctx context.Context, op admin.Operator) ([]T, error),
) error {
	return a.withOperator(ctx, func(ctx context.Context, op admin.Operator) error {
		list, err := read(ctx, op)
		if err != nil {
			return err
		}
		return printListing(a, l, list)
	})
}

// setList makes c a command that reads a list and prints it.
func setList[T any](
	c *cobra.Command, a *operatorCommand, l listing[T],
	read func(ctx context.Context, op admin.Operator, args []string) ([]T, error),
) {
	c.RunE = func(c *cobra.Command, args []string) error {
		return showList(c.Context(), a, l, func(ctx context.Context, op admin.Operator) ([]T, error) { return read(ctx, op, args) })
	}
}

// newListCommand completes c, which has no flags of its own, as a command that shows a list.
func newListCommand[T any](
	p *program, c *cobra.Command, l listing[T], read func(ctx context.Context, op admin.Operator) ([]T, error),
) *cobra.Command {
	a := p.addReadFlags(c)
	c.Args = noArgs
	c.RunE = func(c *cobra.Command, _ []string) error { return showList(c.Context(), a, l, read) }
	return c
}

func printListing[T any](a *operatorCommand, l listing[T], list []T) error {
	return a.printResult(map[string][]T{l.name: list}, func(w io.Writer) { writeList(w, l.empty, l.head, list, l.cells) })
}

// actConfirmed calls act as a dry run, and then again to act, unless it found nothing or the command is a dry
// run itself. Before it acts, it asks for the confirmation of the action that describe returns, a verb phrase
// with a count, or "" if nothing was found.
func actConfirmed[T any](
	ctx context.Context, a *operatorCommand, act func(dryRun bool) (T, error), describe func(found T) string,
) (T, error) {
	found, err := act(true)
	if err != nil || a.dryRun {
		return found, err
	}

	// Nothing to do needs no confirmation.
	action := describe(found)
	if action == "" {
		return found, nil
	}
	if err := a.confirm(ctx, action); err != nil {
		return found, err
	}
	return act(false)
}

// actorName returns the value of --actor, or the name of the user.
func (a *operatorCommand) actorName() string {
	if a.actor != "" {
		return a.actor
	}
	if u, err := user.Current(); err == nil {
		return u.Username
	}
	return "unknown"
}

// errUnconfirmed is the error of a command whose confirmation was not answered with yes.
var errUnconfirmed = errors.New("not confirmed; nothing was done")

// confirm asks the user to confirm an action. action is a verb phrase with a count, such as "discard
// 1,204 dead letters of shop.outbox". With --yes, confirm returns nil at once. Without a terminal, or
// with --json, it returns an error.
func (a *operatorCommand) confirm(ctx context.Context, action string) error {
	if a.yes {
		return nil
	}
	if a.p.context != "" {
		action += " in context " + sanitizeLine(a.p.context)
	}
	if !a.interactive || a.json {
		return fmt.Errorf("this would %s; pass --yes to do it, or --dry-run to see more", action)
	}

	fmt.Fprintf(a.p.errOut, "This will %s. Type yes to continue: ", action)
	line, err := a.readLine(ctx)
	if err == nil && !strings.EqualFold(strings.TrimSpace(line), "yes") {
		err = errUnconfirmed
	}
	return err
}

// readLine returns the next line that the user types. It returns errUnconfirmed when ctx ends first.
func (a *operatorCommand) readLine(ctx context.Context) (string, error) {
	// A read of the terminal cannot be canceled. After an interrupt, the goroutine waits until the
	// process ends.
	answer := make(chan string, 1)
	go func() {
		// The end of the input is an answer, too, and no yes.
		line, _ := bufio.NewReader(a.p.in).ReadString('\n')
		answer <- line
	}()

	select {
	case line := <-answer:
		return line, nil
	case <-ctx.Done():
		fmt.Fprintln(a.p.errOut)
		return "", errUnconfirmed
	}
}

// printResult prints v as JSON with --json, and otherwise the text of writeText.
func (a *operatorCommand) printResult(v any, writeText func(w io.Writer)) error {
	if a.json {
		return printJSON(a.p.out, v)
	}
	return a.p.printText(writeText)
}

// printLine prints v as JSON with --json, and otherwise one line.
func (a *operatorCommand) printLine(v any, format string, args ...any) error {
	return a.printResult(v, func(w io.Writer) { fmt.Fprintf(w, format+"\n", args...) })
}

// chooseText returns done, or planned for a dry run.
func (a *operatorCommand) chooseText(done, planned string) string {
	if a.dryRun {
		return planned
	}
	return done
}

// printText prints the text of writeText in one write. So writeText, whose writer cannot fail, handles no errors.
func (p *program) printText(writeText func(w io.Writer)) error {
	var text bytes.Buffer
	writeText(&text)
	_, err := p.out.Write(text.Bytes())
	return err
}

// progress is a progress bar. The zero progress draws nothing.
type progress struct{ bar *progressbar.ProgressBar }

// startProgress starts a bar up to total, or one without an end if total is below 0. It draws only on a
// terminal and without --json.
func (a *operatorCommand) startProgress(description string, total int64) progress {
	if !a.onTerminal || a.json {
		return progress{}
	}

	return progress{progressbar.NewOptions64(total,
		progressbar.OptionSetWriter(a.p.errOut),
		progressbar.OptionSetDescription(description),
		progressbar.OptionShowCount(),
		progressbar.OptionShowIts(),
		progressbar.OptionThrottle(100*time.Millisecond),
		progressbar.OptionClearOnFinish(),
		progressbar.OptionSetRenderBlankState(true),
	)}
}

// setDone sets the number of finished items.
func (p progress) setDone(n int64) {
	if p.bar != nil {
		// A bar that cannot be drawn does not stop the work.
		_ = p.bar.Set64(n)
	}
}

// clear removes the bar from the terminal. It may be called more than once.
func (p progress) clear() {
	if p.bar != nil {
		// A bar that cannot be removed does not stop the work.
		_ = p.bar.Exit()
		_ = p.bar.Clear()
	}
}

// cells are the values of a row of a table.
type cells []any

// writeTable writes head and a row for each item in aligned columns. w must be a writer that cannot fail.
func writeTable[T any](w io.Writer, head string, list []T, cellsOf func(item T) cells) {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, head)

	for _, item := range list {
		var row []string
		for _, c := range cellsOf(item) {
			// A tab or line break in a value would start another cell or row.
			row = append(row, sanitizeLine(fmt.Sprint(c)))
		}
		fmt.Fprintln(t, strings.Join(row, "\t"))
	}
	// It returns only errors of w.
	_ = t.Flush()
}

// writeList is writeTable, or writes the text empty for an empty list.
func writeList[T any](w io.Writer, empty, head string, list []T, cellsOf func(item T) cells) {
	if len(list) == 0 {
		fmt.Fprintln(w, empty)
		return
	}
	writeTable(w, head, list, cellsOf)
}

// writePage is writeList for a page of a longer list. It also writes the number of items, here and in all, and
// the cursor of the next page.
func writePage[T any](w io.Writer, empty, head string, list []T, total int64, noun, next string, cellsOf func(item T) cells) {
	if total == 0 {
		fmt.Fprintln(w, empty)
		return
	}

	writeTable(w, head, list, cellsOf)
	fmt.Fprintf(w, "%s of %s\n", formatThousands(int64(len(list))), countNoun(total, noun))
	if next != "" {
		fmt.Fprintf(w, "next page: --after %s\n", next)
	}
}

// sanitizeLine makes s safe to print, because text from a document may hold control characters. It
// returns "-" for "".
func sanitizeLine(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 {
			return ' '
		}
		return r
	}, s)

	if s == "" {
		return "-"
	}
	return s
}

// quoteArgument returns an id as the argument of a command, in quotes if a shell would change it.
func quoteArgument(id string) string {
	id = sanitizeLine(id)
	plain := func(r rune) bool {
		return r > 0x7f || unicode.IsLetter(r) || unicode.IsDigit(r) || strings.ContainsRune("-_.:/@%+=,", r)
	}
	if strings.TrimLeftFunc(id, plain) == "" {
		return id
	}
	return "'" + strings.ReplaceAll(id, "'", `'\''`) + "'"
}

// countNoun returns n with its noun: "1 envelope", "1,204 envelopes".
func countNoun(n int64, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return formatThousands(n) + " " + noun
}

func formatThousands(n int64) string {
	s := strconv.FormatInt(n, 10)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// formatLocal returns t in the zone of this machine and with that zone, as the flags for times accept it. It returns "-" for
// no time.
func formatLocal(t *time.Time) string {
	if t == nil || t.IsZero() {
		return "-"
	}
	return t.Local().Format(time.RFC3339)
}

func isTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}
