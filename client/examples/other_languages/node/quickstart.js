// Gradients from the service by its protos alone: a unary call, a streamed one, and refusals.
//
//     node quickstart.js localhost:50051 [FILE]
//
// FILE gets the bytes of the gradients. Numbers are little-endian, as this machine's are taken to be.
'use strict';
const fs = require('fs');
const path = require('path');
const { Readable } = require('stream');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const PROTOS = process.env.PROTOS ?? path.join(__dirname, '../../../../protos');
const FILES = ['npugrad/v1/backward.proto', 'npugrad/v1/errors.proto'];
const definition = loader.loadSync(FILES, {
  keepCase: true, longs: Number, defaults: true, oneofs: true, includeDirs: [PROTOS],
});
const { BackwardService } = grpc.loadPackageDefinition(definition).npugrad.v1;
// The fields of the request from number 2 on: the place in this list is the `operand` of a chunk.
const OPERANDS = ['grad_output', 'input', 'grid', 'interpolation_mode', 'padding_mode', 'align_corners',
  'output_mask', 'input_grad', 'grid_grad'];
const CHUNK_BYTES = 2 ** 20;
const options = () => ({ deadline: Date.now() + 60_000 });

class ServiceError extends Error { // what errors.proto says: see the fields of ErrorInfo there
  constructor(error) {
    super(error.details);
    const read = (name, bytes) => definition[`npugrad.v1.${name}`]?.deserialize(bytes);
    const [bytes] = error.metadata.get('grpc-status-details-bin');
    const found = (bytes ? read('ErrorStatus', bytes).details : []).map(({ type_url, value }) => {
      const name = type_url.split('.').pop();
      return [name, read(name, value)];
    });
    const details = Object.fromEntries(found);
    Object.assign(this, { status: grpc.status[error.code], ...details.ErrorInfo });
    this.violations = details.BadRequest?.field_violations ?? [];
    this.retryDelay = details.RetryInfo?.retry_delay; // { seconds, nanos }: the same call may succeed then
  }
}

const unary = (client, request) => new Promise((resolve, reject) => {
  client.GridSampler2DBackward(request, options(),
    (error, response) => (error ? reject(new ServiceError(error)) : resolve(response)));
});

function* frames(request) { // the header announces each tensor, then the chunks bring them
  const tensors = Object.entries(request).filter(([, field]) => field?.data);
  const announced = tensors.map(([name, { meta, data }]) => [name, { meta, chunked_bytes: data.length }]);
  yield { header: { grid_sampler_2d_backward: { ...request, ...Object.fromEntries(announced) } } };
  for (const [name, { data }] of tensors) {
    for (let offset = 0; offset < data.length; offset += CHUNK_BYTES) {
      const piece = data.subarray(offset, offset + CHUNK_BYTES);
      yield { chunk: { operand: OPERANDS.indexOf(name), offset, data: piece } };
    }
  }
}

const execute = (client, request) => new Promise((resolve, reject) => {
  const stream = client.Execute(options());
  let response;
  stream.on('data', ({ header, chunk }) => {
    if (chunk) {
      chunk.data.copy(response[OPERANDS[chunk.operand]].data, chunk.offset);
      return;
    }
    response = header.grid_sampler_2d_backward;
    for (const tensor of [response.input_grad, response.grid_grad]) {
      tensor.data ??= Buffer.alloc(tensor.chunked_bytes); // small results come in the header
    }
  });
  stream.on('error', (error) => reject(new ServiceError(error)));
  stream.on('end', () => resolve(response));
  Readable.from(frames(request)).pipe(stream); // waits where the service does
});

function tensor(...shape) {
  const length = shape.reduce((a, b) => a * b);
  const numbers = Float32Array.from({ length }, (_, i) => (i * 37 % 101) / 50 - 1);
  return { meta: { data_type: 'DATA_TYPE_FLOAT32', shape }, data: Buffer.from(numbers.buffer) };
}

async function main([target, file]) {
  // gRPC's own limit is 4 MiB, and a reply may be larger.
  const client = new BackwardService(target, grpc.credentials.createInsecure(),
    { 'grpc.max_receive_message_length': -1 });
  const request = {
    grad_output: tensor(1, 3, 64, 64), input: tensor(1, 3, 512, 512), grid: tensor(1, 64, 64, 2),
    interpolation_mode: 0, padding_mode: 0, align_corners: false, output_mask: { values: [true, true] },
  };
  const { info, input_grad, grid_grad } = await unary(client, request);
  console.log(`unary: ${input_grad.data.length + grid_grad.data.length} bytes from ${info.device}`);
  const streamed = await execute(client, request);
  const same = streamed.input_grad.data.equals(input_grad.data) && streamed.grid_grad.data.equals(grid_grad.data);
  console.log(`streamed: ${same ? 'the same bits' : 'OTHER BITS'}`);
  for (const call of [unary, execute]) {
    const error = await call(client, { ...request, interpolation_mode: 7 }).catch((failure) => failure);
    const rules = (error.violations ?? []).map(({ reason, description }) => ` ${reason}: ${description}`);
    console.log(`refused: ${error.reason} ${error.metadata?.code ?? ''}${rules.join('')}`);
  }
  if (file) fs.writeFileSync(file, Buffer.concat([input_grad.data, grid_grad.data]));
  client.close();
  process.exitCode = same ? 0 : 1;
}

main(process.argv.slice(2)).catch((error) => {
  console.error(`${error.reason ?? 'not from the service'}: ${error.message}`);
  process.exitCode = 1;
});
