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

// acting is what the commands share that look into a watcher's collections, or change something there: their flags, the
// connection, the question before anything is done, and the way to print.
type acting struct {
	p      *program
	json   bool
	dryRun bool
	yes    bool
	actor  string
	slot   string // only this one, where an action is on leases

	asks  bool // there is a person to ask
	draws bool // standard error is a terminal
}

// looking adds the flags of a command that changes nothing.
func (p *program) looking(c *cobra.Command) *acting {
	a := &acting{p: p, draws: isTerminal(p.errOut)}
	a.asks = a.draws && isTerminal(p.in)
	c.Flags().BoolVar(&a.json, "json", false, "print one JSON object on standard output")
	return a
}

// acting adds the flags of a command that changes something.
func (p *program) acting(c *cobra.Command) *acting {
	a := p.looking(c)
	c.Flags().BoolVar(&a.dryRun, "dry-run", false, "tell what would be done, with counts, and do nothing")
	c.Flags().BoolVarP(&a.yes, "yes", "y", false, "do not ask")
	c.Flags().StringVar(&a.actor, "actor", "", "`name` that the events log gets; default: the user's")
	return a
}

// run connects to the state database and calls f with the operator of the configured watcher. It has no time limit: f may
// work for hours, and a call that the servers do not answer ends by itself. An error that may go away exits with 75.
func (a *acting) run(ctx context.Context, f func(ctx context.Context, o admin.Operator) error) error {
	cfg, _, err := a.p.loadAndLog()
	if err != nil {
		return err
	}
	state, closeClient, err := app.StateDatabase(cfg)
	if err != nil {
		return err
	}
	defer closeClient()
	return outcome(f(ctx, admin.Operator{State: state, Watcher: cfg.Watcher, Actor: a.who(), Source: source, Outboxes: app.Outboxes(cfg, state.Client())}))
}

// source is the way by which an actor came, in the events log.
const source = "cli"

// desk is run for what needs more than the state database.
func (a *acting) desk(ctx context.Context, f func(ctx context.Context, k admin.Desk) error) error {
	cfg, _, err := a.p.load()
	if err != nil {
		return err
	}
	return a.run(ctx, func(ctx context.Context, o admin.Operator) error {
		client := o.State.Client()
		d := &admin.Deployment{
			State: o.State, Watcher: o.Watcher, Node: cfg.Node, Version: thisBuild().Version,
			Outboxes: app.Outboxes(cfg, client), Oplog: app.Oplog(client),
		}
		return f(ctx, d.For(admin.Actor{Name: o.Actor, Source: o.Source}))
	})
}

// look is desk for what is over in a moment.
func (a *acting) look(ctx context.Context, f func(ctx context.Context, k admin.Desk) error) error {
	return a.desk(ctx, func(ctx context.Context, k admin.Desk) error {
		ctx, cancel := context.WithTimeout(ctx, statusTimeout)
		defer cancel()
		return f(ctx, k)
	})
}

// brief is run for what is over in a moment.
func (a *acting) brief(ctx context.Context, f func(ctx context.Context, o admin.Operator) error) error {
	return a.run(ctx, func(ctx context.Context, o admin.Operator) error {
		ctx, cancel := context.WithTimeout(ctx, statusTimeout)
		defer cancel()
		return f(ctx, o)
	})
}

// outcome marks what may go away as such: what the servers did not answer or did not do. A refusal of the use-case's own
// stays one, and a missing privilege too.
func outcome(err error) error {
	const codeUnauthorized = 13
	var se mongo.ServerError
	switch {
	case err == nil:
		return nil
	case mongo.IsTimeout(err), mongo.IsNetworkError(err), errors.Is(err, context.DeadlineExceeded):
		return temporary(unanswered(err))
	case errors.Is(err, context.Canceled), errors.Is(err, admin.ErrOlderNodes), errors.As(err, &se) && !se.HasErrorCode(codeUnauthorized):
		return temporary(err)
	}
	return err
}

func (a *acting) who() string {
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
func (a *acting) confirm(ctx context.Context, what string) error {
	if a.yes {
		return nil
	}
	if !a.asks || a.json {
		return fmt.Errorf("this would %s; say --yes to do it, or --dry-run to see more", what)
	}
	fmt.Fprintf(a.p.errOut, "This will %s. Type yes to go on: ", what)
	line, err := a.line(ctx)
	if err == nil && !strings.EqualFold(strings.TrimSpace(line), "yes") {
		err = errUnconfirmed
	}
	return err
}

// line is what the person types, up to the end of the line.
func (a *acting) line(ctx context.Context) (string, error) {
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

// show prints v for programs, or what people writes for people.
func (a *acting) show(v any, people func(w io.Writer) error) error {
	if a.json {
		return printJSON(a.p.out, v)
	}
	return people(a.p.errOut)
}

// progress shows how far long work is. It draws on a terminal only, and not beside JSON.
type progress struct{ bar *progressbar.ProgressBar }

// progress begins a bar up to total, or one without an end where total is below 0.
func (a *acting) progress(doing string, total int64) progress {
	if !a.draws || a.json {
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

// to says that n are done.
func (p progress) to(n int64) {
	if p.bar != nil {
		_ = p.bar.Set64(n) // a bar that cannot be drawn is no reason to stop
	}
}

// end takes the bar off the terminal; it may be called more than once.
func (p progress) end() {
	if p.bar != nil {
		_ = p.bar.Exit()  // likewise
		_ = p.bar.Clear() // likewise
	}
}

// table writes rows under a head, in columns.
func table(w io.Writer, head string, rows func(row func(cells ...any))) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, head)
	rows(func(cells ...any) {
		for i, c := range cells {
			if i > 0 {
				_, _ = io.WriteString(t, "\t")
			}
			// A tab or a line end of a value would begin a cell or a row of its own.
			_, _ = io.WriteString(t, oneLine(fmt.Sprint(c)))
		}
		fmt.Fprintln(t)
	})
	return t.Flush()
}

// oneLine makes s safe to print: what came from a document may hold anything.
func oneLine(s string) string {
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

// count is n with its noun: "1 envelope", "1,204 envelopes".
func count(n int64, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return thousands(n) + " " + noun
}

func thousands(n int64) string {
	s := strconv.FormatInt(n, 10)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// zoned are the forms of a time that say its zone.
var zoned = []string{time.RFC3339Nano, "2006-01-02T15:04Z07:00"}

// since reads the value of a flag that is a time or, as in 2h, so long ago. "" is the zero time. Without a zone it is UTC.
func since(flag, text string, now time.Time) (time.Time, error) {
	if text == "" {
		return time.Time{}, nil
	}
	if d, err := time.ParseDuration(text); err == nil && d >= 0 {
		return now.Add(-d), nil
	}
	for _, layout := range append(zoned, "2006-01-02T15:04:05", "2006-01-02T15:04", time.DateOnly) {
		if at, err := time.Parse(layout, text); err == nil {
			return at, nil
		}
	}
	return time.Time{}, fmt.Errorf("--%s %q is neither a time such as 2026-11-20T08:00:00Z nor a duration such as 2h", flag, text)
}

// instant is since for what an action depends on: a time has to say its zone there.
func instant(flag, text string, now time.Time) (time.Time, error) {
	at, err := since(flag, text, now)
	if _, d := time.ParseDuration(text); err != nil || text == "" || d == nil {
		return at, err
	}
	for _, layout := range zoned {
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
