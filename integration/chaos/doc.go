// Package chaos breaks everything around hopback and counts.
//
// A run has a lane for each retry strategy: a separate work queue, publishers,
// and workers, which are separate processes, so that they can be killed. Some
// handlers fail, panic or give up, as a function of the seed, the message and the
// attempt. At the same time, one fault after the other is injected into the network, the broker,
// or the workers, in an order that is a function of the seed. At the end
// everything is drained, and the [Ledger] wants to know of every single message
// where it has gone.
//
// What is certain after a crash:
//
//   - A publisher notes that it is about to send before it sends, and the answer
//     when it has it. It lives in the process of the run, which isn't killed.
//   - A handler's record is written to a file by one write before the handler
//     returns, hence before anything can be settled: what the broker holds for
//     done has its record. A process that is killed by -9 in between leaves a
//     record and an unsettled message, which is delivered again: a duplicate,
//     never a loss. Data written to a file outlive the process (not the machine,
//     which nobody kills here). Records have 16 bytes, so that none crosses a
//     page; each carries a checksum, and each process has a separate file, so
//     that a torn record can only be the last.
//   - Dead letters are taken from their queue by the process of the run, and noted
//     before they are accepted.
package chaos
