package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
)

// maxPayload bounds the payload of an edit. It is the maximum size of a MongoDB document, which no
// payload can reach.
const maxPayload = 16 << 20

func writeDeadLetter(out io.Writer, letter admin.DeadLetter) {
	printField := func(name, format string, args ...any) {
		fmt.Fprintf(out, "%-14s %s\n", name, sanitizeLine(fmt.Sprintf(format, args...)))
	}
	if letter.Letter != "" {
		printField("letter", "%s", letter.Letter)
	}
	printField("id", "%s", quoteArgument(letter.ID))
	printField("collection", "%s", letter.Collection)
	printField("delivery", "%d", letter.Delivery)
	printField("version", "%d", letter.Version)
	printField("type", "%s", letter.Type)
	if aggregate := strings.Trim(letter.AggregateType+"/"+letter.AggregateID, "/"); aggregate != "" {
		printField("aggregate", "%s", aggregate)
	}
	printField("key", "%s", letter.Key)
	printField("topic", "%s", letter.Topic)
	if letter.Place != "" {
		printField("place", "%s", letter.Place)
	}
	printField("class", "%s", letter.Class)
	printField("reason", "%s", letter.Reason)

	if source := letter.Source; source.Kind == admin.FromHandler {
		printField("given up by", "handler %s of group %s", cmp.Or(source.Handler, "-"), source.Group)
	} else {
		printField("given up by", "relay %s, node %s", source.Watcher, source.Node)
	}
	printField("first failure", "%s", formatLocal(&letter.FirstFailure))
	printField("died", "%s", formatLocal(&letter.DiedAt))

	if letter.ReplayOf != "" {
		printField("replay of", "%s", letter.ReplayOf)
	}
	// The relay gives the envelope a delivery number. A handler gets the same message again.
	if requeue := letter.Requeued; requeue != nil && letter.Source.Kind == admin.FromHandler {
		printField("requeued", "by %s at %s: %s", requeue.Actor, formatLocal(&requeue.At), requeueState(letter))
	} else if requeue != nil {
		printField("requeued", "by %s at %s as delivery %d", requeue.Actor, formatLocal(&requeue.At), requeue.Delivery)
		if requeue.Topic != "" {
			printField("to topic", "%s", requeue.Topic)
		}
		if len(requeue.Edited) > 0 {
			printField("edited", "%s", strings.Join(requeue.Edited, ", "))
		}
	}

	if archived := letter.Archived; archived != nil {
		printField("discarded", "by %s at %s", archived.Actor, formatLocal(&archived.At))
		printField("removed at", "%s", formatLocal(&archived.Until))
	}

	fmt.Fprintf(out, "\n%s\n", countNoun(int64(len(letter.Attempts)), "attempt"))
	writeTable(out, "AT\tTOPIC\tCLASS\tNODE\tREASON", letter.Attempts, func(attempt admin.DeadAttempt) cells {
		return cells{formatLocal(&attempt.At), attempt.Topic, attempt.Class, attempt.Node, truncate(attempt.Reason, 120)}
	})

	size := countNoun(int64(letter.Size), "byte")
	var pretty bytes.Buffer
	if json.Indent(&pretty, letter.Envelope, "", "  ") != nil {
		fmt.Fprintf(out, "\nthe envelope, %s, cannot be shown as JSON\n", size)
		return
	}
	fmt.Fprintf(out, "\nenvelope, %s\n%s\n", size, pretty.Bytes())
}

// deadEditFlags holds the flags of an edit.
type deadEditFlags struct {
	version     int32
	payload     string
	payloadAs   string
	headers     []string
	fields      []string
	unset       []string
	namedFields map[string]*string // fields with their own flag, such as --topic
}

func addDeadEditFlags(cmd *cobra.Command) *deadEditFlags {
	deadEditFlags := &deadEditFlags{namedFields: map[string]*string{}}
	flags := cmd.Flags()
	flags.Int32Var(&deadEditFlags.version, "version", 0, "the `version` of the dead letter from dead show; the edit fails if it has changed since")
	flags.StringVar(&deadEditFlags.payload, "payload", "", "a `file` with the new payload, or - for standard input")
	flags.StringVar(&deadEditFlags.payloadAs, "payload-as", "", "binary, string, json or null; default: the current type of the payload")
	flags.StringArrayVar(&deadEditFlags.headers, "header", nil, "a header as `name=value`; may be repeated; replaces all existing headers")
	flags.StringArrayVar(&deadEditFlags.fields, "field", nil, "another field of the envelope as `name=value`; may be repeated")
	flags.StringSliceVar(&deadEditFlags.unset, "unset", nil, "`fields` to remove, separated by commas")
	for _, f := range []string{"topic", "key", "type"} {
		deadEditFlags.namedFields[f] = flags.String(f, "", "the new "+f)
	}
	return deadEditFlags
}

// parseEdit returns the edit that the flags describe. It reads the payload from its file or from in.
func (e *deadEditFlags) parseEdit(cmd *cobra.Command, in io.Reader) (admin.DeadEdit, error) {
	out := admin.DeadEdit{Version: e.version, PayloadAs: e.payloadAs, Unset: e.unset, Fields: map[string]string{}}
	// Without the version, the edit could replace an edit that another person made after the letter was shown.
	if !cmd.Flags().Changed("version") {
		return out, fmt.Errorf("--version is missing: pass the version that `outrelay dead show` prints for the dead letter")
	}

	for _, f := range e.fields {
		name, value, ok := strings.Cut(f, "=")
		if !ok || name == "" {
			return out, fmt.Errorf("--field %q is not name=value", f)
		}
		if name == "payload" || name == "headers" {
			return out, fmt.Errorf("--field cannot set %s: use %s", name, editFlag(name))
		}
		out.Fields[name] = value
	}
	// Flags with a name, such as --topic, override the same field in --field.
	for name, value := range e.namedFields {
		if cmd.Flags().Changed(name) {
			out.Fields[name] = *value
		}
	}

	for _, h := range e.headers {
		name, value, ok := strings.Cut(h, "=")
		if !ok || name == "" {
			return out, fmt.Errorf("--header %q is not name=value", sanitizeLine(name))
		}
		out.Headers = append(out.Headers, [2]string{name, value})
	}

	var err error
	out.Payload, err = e.readPayload(in)
	return out, err
}

// readPayload returns the new payload, or nil if the letter keeps its payload. An empty new payload is not nil.
func (e *deadEditFlags) readPayload(in io.Reader) ([]byte, error) {
	if e.payload == "" {
		return nil, nil
	}
	if e.payload != "-" {
		file, err := os.Open(e.payload)
		if err != nil {
			return nil, fmt.Errorf("--payload: %w", err)
		}
		defer file.Close()
		in = file
	}

	// One byte above the limit distinguishes a payload that is too long from one that fits.
	payload, err := io.ReadAll(io.LimitReader(in, maxPayload+1))
	if err != nil {
		return nil, fmt.Errorf("reading the payload: %w", err)
	}
	if len(payload) > maxPayload {
		return nil, fmt.Errorf("the payload exceeds %s bytes, more than an envelope can hold", formatThousands(maxPayload))
	}
	// nil means unchanged, so an empty file needs an empty slice.
	if payload == nil {
		payload = []byte{}
	}
	return payload, nil
}

func newDeadEditCommand(program *program) *cobra.Command {
	var options admin.DeadOptions
	cmd := &cobra.Command{
		Use:   "edit ID",
		Short: "Change the envelope of one dead letter and deliver it again",
		Long: `Change the envelope of one dead letter and deliver it again as the next delivery. The
letter keeps the original envelope. The command can also complete a letter that has only an id: set
aggregatetype, aggregateid, type and a payload. The result is checked before anything is written.

Of a letter of a handler, change the key, the headers or the payload of the message and hand it back
to the handler. The new payload contains the bytes of the file, so --payload-as can only be null.`,
		Example: `  outrelay dead edit 0190b3c2-… --version 0 --topic payments.v2
  outrelay dead edit 0190b3c2-… --version 0 --payload order.json --unset contenttype
  outrelay dead edit 0190b3c2-… --version 0 --field aggregatetype=order --field aggregateid=7 --type OrderPlaced --payload - --payload-as json`,
		Args: exactArgs(1),
	}

	action, ref, flags := program.addChangeFlags(cmd), addDeadRefFlags(cmd), addDeadEditFlags(cmd)
	addToFlag(cmd, &options)
	cmd.Flags().BoolVar(&options.IgnoreExpiry, "ignore-expiry", false, "also requeue an expired envelope; it does not expire again")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		edit, err := flags.parseEdit(cmd, program.in)
		if err != nil {
			return err
		}

		ref.ID, options.DryRun = args[0], action.dryRun
		return action.withOperator(cmd.Context(), func(ctx context.Context, op admin.Operator) error {
			if !action.dryRun {
				if err := action.confirm(ctx, "change 1 dead letter and requeue it; consumers get the same id again"); err != nil {
					return err
				}
			}

			got, err := op.Letters().Edit(ctx, *ref, edit, options)
			if err != nil {
				return explainEdit(err)
			}

			verb := action.chooseText("is requeued", "would be requeued")
			return action.printLine(got, "%s of %s %s as delivery %d with changed %s",
				quoteArgument(got.ID), got.Collection, verb, got.Delivery, strings.Join(got.Edited, ", "))
		})
	}
	return cmd
}

// explainEdit names the flags that a rejected edit lacks.
func explainEdit(err error) error {
	var rejected *letters.RejectedError
	if !errors.As(err, &rejected) || len(rejected.Fields) == 0 {
		return err
	}
	flags := make([]string, len(rejected.Fields))
	for i, field := range rejected.Fields {
		flags[i] = editFlag(field)
	}
	return fmt.Errorf("%w: add %s", err, strings.Join(flags, " "))
}

// editFlag returns the flag that sets a field of an envelope.
func editFlag(field string) string {
	switch field {
	case "type":
		return "--type TYPE"
	case "payload":
		return "--payload FILE"
	case "headers":
		return "--header NAME=VALUE"
	}
	return "--field " + field + "=VALUE"
}
