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
	"github.com/outrelay/outrelay/internal/relay/process"
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
func (p *program) addReadFlags(cmd *cobra.Command) *operatorCommand {
	action := &operatorCommand{p: p, onTerminal: isTerminal(p.errOut), limit: statusTimeout}
	action.interactive = action.onTerminal && isTerminal(p.in)
	cmd.Flags().BoolVar(&action.json, "json", false, "print one JSON object on standard output")
	return action
}

// addChangeFlags adds the flags of a command that changes something.
func (p *program) addChangeFlags(cmd *cobra.Command) *operatorCommand {
	action := p.addReadFlags(cmd)
	// A change may work for hours, and waits for the answer of a person.
	action.limit = 0
	cmd.Flags().BoolVar(&action.dryRun, "dry-run", false, "print the planned changes with counts, and change nothing")
	cmd.Flags().BoolVarP(&action.yes, "yes", "y", false, "skip the confirmation")
	action.addActorFlag(cmd)
	return action
}

// addActorFlag adds the flag of a command that changes something and writes to the audit log.
func (a *operatorCommand) addActorFlag(cmd *cobra.Command) {
	a.changes = true
	cmd.Flags().StringVar(&a.actor, "actor", "", "`name` for the audit log; default: the name of the user")
}

// withOperator connects to the state database and calls run with the operator of the configured watcher.
// If a later attempt may succeed, the returned error exits with 75.
func (a *operatorCommand) withOperator(ctx context.Context, run func(ctx context.Context, op admin.Operator) error) error {
	cfg, _, err := a.p.loadWithLogger()
	if err != nil {
		return err
	}
	state, closeClient, err := connect.StateDatabase(cfg, connect.MongoHost{})
	if err != nil {
		return err
	}
	defer closeClient()

	op, err := operators.NewOperator(cfg, process.Host{}, thisBuild().Version, state)
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
	err = run(limited, op.For(admin.Actor{Name: a.actorName(), Source: source}))
	return explainError(ctx, cfg, err)
}

// announceContext prints the context of a command that may change something.
func (a *operatorCommand) announceContext() {
	if a.changes && a.p.context != "" && !a.json {
		fmt.Fprintf(a.p.errOut, "context %s\n", sanitizeLine(a.p.context))
	}
}

// explainError is classifyError. If MongoDB did not respond, it connects once more to find the cause and the fix. A rejected
// adoption or import stays permanent.
func explainError(ctx context.Context, cfg config.Config, err error) error {
	if errors.Is(err, adopt.ErrRejected) || errors.Is(err, importing.ErrRejected) {
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

// setRun makes run the action of cmd. run gets the operator of the configured watcher and the arguments of the command.
func (a *operatorCommand) setRun(cmd *cobra.Command, run func(ctx context.Context, op admin.Operator, args []string) error) {
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return a.withOperator(cmd.Context(), func(ctx context.Context, op admin.Operator) error { return run(ctx, op, args) })
	}
}

// toFilterIDs returns the arguments of a command as the ids of a filter. An empty list would select nothing; nil is no condition.
func toFilterIDs(args []string) []string {
	if len(args) == 0 {
		return nil
	}
	return args
}

// setShow makes cmd a command that reads a value and prints it.
func setShow[T any](
	cmd *cobra.Command, action *operatorCommand,
	read func(ctx context.Context, op admin.Operator, args []string) (T, error), writeText func(out io.Writer, value T),
) {
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return show(cmd.Context(), action, func(ctx context.Context, op admin.Operator) (T, error) { return read(ctx, op, args) }, writeText)
	}
}

// show reads a value and prints it: as JSON with --json, else by writeText.
func show[T any](
	ctx context.Context, action *operatorCommand,
	read func(ctx context.Context, op admin.Operator) (T, error), writeText func(out io.Writer, value T),
) error {
	return action.withOperator(ctx, func(ctx context.Context, op admin.Operator) error {
		value, err := read(ctx, op)
		if err != nil {
			return err
		}
		return action.printResult(value, func(out io.Writer) { writeText(out, value) })
	})
}

// actConfirmed calls act as a dry run, and then again to act, unless it found nothing or the command is a dry
// run itself. Before it acts, it asks for the confirmation of the action that describe returns, a verb phrase
// with a count, or "" if nothing was found.
func actConfirmed[T any](
	ctx context.Context, command *operatorCommand, act func(dryRun bool) (T, error), describe func(found T) string,
) (T, error) {
	found, err := act(true)
	if err != nil || command.dryRun {
		return found, err
	}

	// Nothing to do needs no confirmation.
	action := describe(found)
	if action == "" {
		return found, nil
	}
	if err := command.confirm(ctx, action); err != nil {
		return found, err
	}
	return act(false)
}

// nothingMatches is the line of an action whose conditions select nothing. Ids that match nothing are a mistake, and an error; conditions
// need not match anything, for example in a command that runs every day.
const nothingMatches = "nothing matches; nothing was changed"

// actorName returns the value of --actor, or the name of the user.
func (a *operatorCommand) actorName() string {
	if a.actor != "" {
		return a.actor
	}
	if account, err := user.Current(); err == nil {
		return account.Username
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

// printResult prints value as JSON with --json, and otherwise the text of writeText.
func (a *operatorCommand) printResult(value any, writeText func(out io.Writer)) error {
	if a.json {
		return printJSON(a.p.out, value)
	}
	return a.p.printText(writeText)
}

// printLine prints value as JSON with --json, and otherwise one line.
func (a *operatorCommand) printLine(value any, format string, args ...any) error {
	return a.printResult(value, func(out io.Writer) { fmt.Fprintf(out, format+"\n", args...) })
}

// printNamed prints the result of an action on named ids, which ended with err, and the ids with which it did nothing, each with the reason why.
// Then the exit code is not 0: a script that names an id relies on the action.
func (a *operatorCommand) printNamed(value any, err error, text, why string, notDone []string) error {
	printErr := a.printResult(value, func(out io.Writer) {
		writeNotDone(out, why, notDone)
		fmt.Fprintln(out, text)
	})
	if err == nil && printErr == nil && len(notDone) > 0 {
		return reportedError(exitConfig)
	}
	return errors.Join(err, printErr)
}

// writeNotDone writes the ids with which an action did nothing, each with the reason why.
func writeNotDone(out io.Writer, why string, ids []string) {
	for _, id := range ids {
		fmt.Fprintf(out, "%s %s\n", quoteArgument(id), why)
	}
}

// chooseText returns done, or planned for a dry run.
func (a *operatorCommand) chooseText(done, planned string) string {
	if a.dryRun {
		return planned
	}
	return done
}

// printText prints the text of writeText in one write. So writeText, whose writer cannot fail, handles no errors.
func (p *program) printText(writeText func(out io.Writer)) error {
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

// sanitizeLine makes text safe to print, because text from a document may hold control characters. It
// returns "-" for "".
func sanitizeLine(text string) string {
	text = strings.Map(func(char rune) rune {
		if char < ' ' || char == 0x7f || char >= 0x80 && char < 0xa0 {
			return ' '
		}
		return char
	}, text)

	if text == "" {
		return "-"
	}
	return text
}

// quoteArgument returns an id as the argument of a command, in quotes if a shell would change it.
func quoteArgument(id string) string {
	id = sanitizeLine(id)
	plain := func(char rune) bool {
		return char > 0x7f || unicode.IsLetter(char) || unicode.IsDigit(char) || strings.ContainsRune("-_.:/@%+=,", char)
	}
	if strings.TrimLeftFunc(id, plain) == "" {
		return id
	}
	return "'" + strings.ReplaceAll(id, "'", `'\''`) + "'"
}

// countNoun returns n with its noun: "1 envelope", "1,204 envelopes".
func countNoun(n int64, noun string) string {
	switch stem, isEntry := strings.CutSuffix(noun, "ry"); {
	case n == 1:
	case isEntry:
		noun = stem + "ries"
	default:
		noun += "s"
	}
	return formatThousands(n) + " " + noun
}

func formatThousands(n int64) string {
	text := strconv.FormatInt(n, 10)
	for i := len(text) - 3; i > 0 && text[i-1] != '-'; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}

// formatLocal returns moment in the zone of this machine and with that zone, as the flags for times accept it. It returns "-" for
// no time.
func formatLocal(moment *time.Time) string {
	if moment == nil || moment.IsZero() {
		return "-"
	}
	return moment.Local().Format(time.RFC3339)
}

func isTerminal(stream any) bool {
	file, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(file.Fd()))
}
