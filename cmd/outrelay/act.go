package main

import (
	"bufio"
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

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"golang.org/x/term"

	"github.com/outrelay/outrelay/internal/admin"
	"github.com/outrelay/outrelay/internal/app"
)

// operatorCommand is what the commands share that look into a watcher's collections, or change something there: their flags, the
// connection, the question before anything is done, and the way to print.
type operatorCommand struct {
	p      *program
	json   bool
	dryRun bool
	yes    bool
	actor  string
	slot   string // only this one, where an action is on leases

	interactive bool // there is a person to ask
	onTerminal  bool // standard error is a terminal
}

// addReadFlags adds the flags of a command that changes nothing.
func (p *program) addReadFlags(c *cobra.Command) *operatorCommand {
	a := &operatorCommand{p: p, onTerminal: isTerminal(p.errOut)}
	a.interactive = a.onTerminal && isTerminal(p.in)
	c.Flags().BoolVar(&a.json, "json", false, "print one JSON object on standard output")
	return a
}

// addChangeFlags adds the flags of a command that changes something.
func (p *program) addChangeFlags(c *cobra.Command) *operatorCommand {
	a := p.addReadFlags(c)
	c.Flags().BoolVar(&a.dryRun, "dry-run", false, "tell what would be done, with counts, and do nothing")
	c.Flags().BoolVarP(&a.yes, "yes", "y", false, "do not ask")
	c.Flags().StringVar(&a.actor, "actor", "", "`name` that the events log gets; default: the user's")
	return a
}

// withOperator connects to the state database and calls f with the operator of the configured watcher. It has no time limit: f may
// work for hours, and a call that the servers do not answer ends by itself. An error that may go away exits with 75.
func (a *operatorCommand) withOperator(ctx context.Context, f func(ctx context.Context, o admin.Operator) error) error {
	cfg, _, err := a.p.loadWithLogger()
	if err != nil {
		return err
	}
	state, closeClient, err := app.StateDatabase(cfg)
	if err != nil {
		return err
	}
	defer closeClient()
	return classifyError(f(ctx, admin.Operator{State: state, Watcher: cfg.Watcher, Actor: a.actorName(), Source: source, Outboxes: app.Outboxes(cfg, state.Client())}))
}

// source is the way by which an actor came, in the events log.
const source = "cli"

// withDesk is run for what needs more than the state database.
func (a *operatorCommand) withDesk(ctx context.Context, f func(ctx context.Context, k admin.Desk) error) error {
	cfg, _, err := a.p.loadConfig()
	if err != nil {
		return err
	}
	return a.withOperator(ctx, func(ctx context.Context, o admin.Operator) error {
		client := o.State.Client()
		d := &admin.Deployment{
			State: o.State, Watcher: o.Watcher, Node: cfg.Node, Version: thisBuild().Version,
			Outboxes: app.Outboxes(cfg, client), Oplog: app.Oplog(client),
		}
		return f(ctx, d.For(admin.Actor{Name: o.Actor, Source: o.Source}))
	})
}

// withDeskBriefly is desk for what is over in a moment.
func (a *operatorCommand) withDeskBriefly(ctx context.Context, f func(ctx context.Context, k admin.Desk) error) error {
	return a.withDesk(ctx, func(ctx context.Context, k admin.Desk) error {
		ctx, cancel := context.WithTimeout(ctx, statusTimeout)
		defer cancel()
		return f(ctx, k)
	})
}

// withOperatorBriefly is run for what is over in a moment.
func (a *operatorCommand) withOperatorBriefly(ctx context.Context, f func(ctx context.Context, o admin.Operator) error) error {
	return a.withOperator(ctx, func(ctx context.Context, o admin.Operator) error {
		ctx, cancel := context.WithTimeout(ctx, statusTimeout)
		defer cancel()
		return f(ctx, o)
	})
}

// classifyError marks what may go away as such: what the servers did not answer or did not do. A refusal of the use-case's own
// stays one, and a missing privilege too.
func classifyError(err error) error {
	const codeUnauthorized = 13
	var se mongo.ServerError
	switch {
	case err == nil:
		return nil
	case mongo.IsTimeout(err), mongo.IsNetworkError(err), errors.Is(err, context.DeadlineExceeded):
		return markTemporary(explainUnreachable(err))
	case errors.Is(err, context.Canceled), errors.Is(err, admin.ErrOlderNodes), errors.As(err, &se) && !se.HasErrorCode(codeUnauthorized):
		return markTemporary(err)
	}
	return err
}

func (a *operatorCommand) actorName() string {
	if a.actor != "" {
		return a.actor
	}
	if u, err := user.Current(); err == nil {
		return u.Username
	}
	return "unknown"
}

// errUnconfirmed is a question that was answered with anything but yes.
var errUnconfirmed = errors.New("nothing was done")

// confirm asks before something is done that a person had better see coming; what names it with its count, such as
// "discard 1,204 dead letters of shop.outbox". With --yes it asks nothing; without a terminal it refuses.
func (a *operatorCommand) confirm(ctx context.Context, what string) error {
	if a.yes {
		return nil
	}
	if !a.interactive || a.json {
		return fmt.Errorf("this would %s; say --yes to do it, or --dry-run to see more", what)
	}
	fmt.Fprintf(a.p.errOut, "This will %s. Type yes to go on: ", what)
	line, err := a.readLine(ctx)
	if err == nil && !strings.EqualFold(strings.TrimSpace(line), "yes") {
		err = errUnconfirmed
	}
	return err
}

// readLine is what the person types, up to the end of the line.
func (a *operatorCommand) readLine(ctx context.Context) (string, error) {
	// A read of the terminal cannot be called back: after an interrupt it waits until the process ends.
	answer := make(chan string, 1)
	go func() {
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

// printResult prints v for programs, or what people writes for people.
func (a *operatorCommand) printResult(v any, people func(w io.Writer) error) error {
	if a.json {
		return printJSON(a.p.out, v)
	}
	return people(a.p.errOut)
}

// progress shows how far long work is. It draws on a terminal only, and not beside JSON.
type progress struct{ bar *progressbar.ProgressBar }

// startProgress begins a bar up to total, or one without an end where total is below 0.
func (a *operatorCommand) startProgress(doing string, total int64) progress {
	if !a.onTerminal || a.json {
		return progress{}
	}
	return progress{progressbar.NewOptions64(total,
		progressbar.OptionSetWriter(a.p.errOut),
		progressbar.OptionSetDescription(doing),
		progressbar.OptionShowCount(),
		progressbar.OptionShowIts(),
		progressbar.OptionThrottle(100*time.Millisecond),
		progressbar.OptionClearOnFinish(),
		progressbar.OptionSetRenderBlankState(true),
	)}
}

// setDone says that n are done.
func (p progress) setDone(n int64) {
	if p.bar != nil {
		_ = p.bar.Set64(n) // a bar that cannot be drawn is no reason to stop
	}
}

// clear takes the bar off the terminal; it may be called more than once.
func (p progress) clear() {
	if p.bar != nil {
		_ = p.bar.Exit()  // likewise
		_ = p.bar.Clear() // likewise
	}
}

// writeTable writes rows under a head, in columns.
func writeTable(w io.Writer, head string, rows func(row func(cells ...any))) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, head)
	rows(func(cells ...any) {
		for i, c := range cells {
			if i > 0 {
				_, _ = io.WriteString(t, "\t")
			}
			// A tab or a line end of a value would begin a cell or a row of its own.
			_, _ = io.WriteString(t, sanitizeLine(fmt.Sprint(c)))
		}
		fmt.Fprintln(t)
	})
	return t.Flush()
}

// sanitizeLine makes s safe to print: what came from a document may hold anything.
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

// countNoun is n with its noun: "1 envelope", "1,204 envelopes".
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

// zonedLayouts are the forms of a time that say its zone.
var zonedLayouts = []string{time.RFC3339Nano, "2006-01-02T15:04Z07:00"}

// parsePastTime reads the value of a flag that is a time or, as in 2h, so long ago. "" is the zero time. Without a zone it is UTC.
func parsePastTime(flag, text string, now time.Time) (time.Time, error) {
	if text == "" {
		return time.Time{}, nil
	}
	if d, err := time.ParseDuration(text); err == nil && d >= 0 {
		return now.Add(-d), nil
	}
	for _, layout := range append(zonedLayouts, "2006-01-02T15:04:05", "2006-01-02T15:04", time.DateOnly) {
		if at, err := time.Parse(layout, text); err == nil {
			return at, nil
		}
	}
	return time.Time{}, fmt.Errorf("--%s %q is neither a time such as 2026-11-20T08:00:00Z nor a duration such as 2h", flag, text)
}

// parseZonedPastTime is since for what an action depends on: a time has to say its zone there.
func parseZonedPastTime(flag, text string, now time.Time) (time.Time, error) {
	at, err := parsePastTime(flag, text, now)
	if _, d := time.ParseDuration(text); err != nil || text == "" || d == nil {
		return at, err
	}
	for _, layout := range zonedLayouts {
		if at, err := time.Parse(layout, text); err == nil {
			return at, nil
		}
	}
	return time.Time{}, fmt.Errorf("--%s %q does not say its time zone: write %s if that is what is meant, or a duration such as 2h", flag, text, at.Format(time.RFC3339))
}

func isTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}
